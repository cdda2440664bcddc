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
// The theme has two asides; a screen reader tells them apart by their names.
function nameAsides() {
  document.querySelector("aside.sidebar-drawer")?.setAttribute("aria-label", "Pages");
  document.querySelector("aside.toc-drawer")?.setAttribute("aria-label", "On this page");
}
window.addEventListener("DOMContentLoaded", nameAsides);
window.addEventListener("load", makeScrollable);
window.addEventListener("resize", makeScrollable);
