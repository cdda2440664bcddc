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
// Outputs wrap, but not those with columns: two lines one after the other with gaps inside.
function findTables() {
  for (const box of document.querySelectorAll(".output pre")) {
    const gaps = box.textContent.split("\n").map((line) => /\S {2,}\S.* {2,}\S/.test(line));
    box.classList.toggle("aligned", gaps.some((gap, place) => gap && gaps[place + 1]));
  }
}
// The theme has two asides; a screen reader tells them apart by their names.
function nameAsides() {
  document.querySelector("aside.sidebar-drawer")?.setAttribute("aria-label", "Pages");
  document.querySelector("aside.toc-drawer")?.setAttribute("aria-label", "On this page");
}
window.addEventListener("DOMContentLoaded", nameAsides);
window.addEventListener("DOMContentLoaded", findTables);
window.addEventListener("load", makeScrollable);
window.addEventListener("resize", makeScrollable);
