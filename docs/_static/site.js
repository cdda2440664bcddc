// What can be scrolled can be reached with the keyboard too: wide tables, long lines of code.
function makeScrollable() {
  for (const box of document.querySelectorAll(".table-wrapper, pre, .formula, p:has(> img)")) {
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
// Links to the pictures of a series, below one of them: a slider that shows them in its place.
function makeSliders() {
  for (const box of document.querySelectorAll(".frames")) {
    const links = [...box.querySelectorAll("a")];
    const before = box.previousElementSibling;
    const shown = before.matches("img") ? before : before.querySelector("img");
    const label = document.createElement("label");
    const slider = Object.assign(document.createElement("input"), {
      type: "range", min: 0, max: links.length - 1, value: links.length - 1,
      ariaLabel: shown.alt,
    });
    const show = () => {
      const link = links[slider.value];
      shown.src = link.href;
      const text = link.textContent.replace(/\s+/g, " ");
      slider.setAttribute("aria-valuetext", text);
      name.textContent = text;
    };
    const name = document.createElement("output");
    slider.addEventListener("input", show);
    label.append(slider, name);
    box.replaceChildren(label);
    show();
  }
}
window.addEventListener("DOMContentLoaded", makeSliders);
