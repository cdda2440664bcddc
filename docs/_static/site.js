// What can be scrolled can be reached with the keyboard too: wide tables, long lines of code.
function makeScrollable() {
  for (const box of document.querySelectorAll(".table-wrapper, pre, .formula")) {
    if (box.scrollWidth > box.clientWidth) {
      box.tabIndex = 0;
    } else {
      box.removeAttribute("tabindex");
    }
  }
}
window.addEventListener("load", makeScrollable);
window.addEventListener("resize", makeScrollable);
