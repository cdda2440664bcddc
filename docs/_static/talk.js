// The talk, one slide a screen: `#slide-4` in the address shows slide 4, and `#view-4` is the presenter's view of it.
"use strict";

(() => {
  const slides = [...document.querySelectorAll("#the-talk > section")];
  const headings = slides.map((slide) => slide.querySelector("h2"));
  const isView = location.hash.startsWith("#view-"), began = Date.now();
  const MOVES = {ArrowRight: 1, ArrowDown: 1, PageDown: 1, " ": 1, Home: -Infinity,
    ArrowLeft: -1, ArrowUp: -1, PageUp: -1, End: Infinity};
  let place = null, other = isView ? window.opener : null;  // the slide that is shown, and the other window

  // Make an element with properties and children.
  function make(tag, properties, ...children) {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  }

  const button = (text, onclick, ariaLabel = text) => make("button", {type: "button", onclick, ariaLabel}, text);
  const counter = make("span", {}), next = make("p", {className: "talk-next"}), clock = make("p", {className: "talk-clock"});
  const bar = make("nav", {className: "talk-bar", ariaLabel: "Slides"},
    button("‹", () => show(place - 1), "Previous slide"), counter, button("›", () => show(place + 1), "Next slide"),
    ...(isView ? [] : [button("Notes", openView, "Notes, in a second window")]), button("×", leave, "Leave"));

  // Show a slide, here and in the other window.
  function show(wanted, tell = true) {
    place = Math.min(slides.length - 1, Math.max(0, wanted));
    document.body.dataset.talk = isView ? "view" : "slide";
    slides.forEach((slide, index) => slide.classList.toggle("shown", index === place));
    counter.textContent = `${place + 1} / ${slides.length}`;
    next.textContent = place + 1 < slides.length ? `Next: ${headings[place + 1].firstChild.data}` : "The last slide";
    history.replaceState(null, "", `#${document.body.dataset.talk}-${place + 1}`);
    if (!bar.contains(document.activeElement)) headings[place].focus({preventScroll: true});
    fit();
    if (tell) other?.postMessage({slide: place}, "*");
  }

  // Give a slide large words, larger ones where there is no figure; then what does not fit becomes smaller.
  function fit() {
    if (place === null) return;
    const slide = slides[place], {clientWidth: width, clientHeight: height} = slide;
    const words = slide.querySelector(".live") ? 0.85 : slide.querySelector("img") ? 1 : 1.25;
    const size = Math.max(Math.min(width / 49, height / 28), Math.min(width / 25, height / 50));
    document.documentElement.style.fontSize = `${words * size}px`;
    slide.style.setProperty("--heading", `${1.7 * size}px`);
    for (const box of slide.querySelectorAll(".live")) box.style.zoom = 1;
    shrink();
  }

  // Make a slide's live figure, or else its words, smaller until all is on the screen. Below 12 pixels an audience reads
  // nothing, and the slide scrolls.
  function shrink() {
    if (place === null) return;
    const slide = slides[place], root = document.documentElement, figure = slide.querySelector(".live");
    const boxes = [slide, ...slide.querySelectorAll(".live-wide, pre")], first = parseFloat(root.style.fontSize);
    const isCutOff = (box) => box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight;
    for (let part = figure ? figure.style.zoom : 1; part * first > (isView ? 4 : 12) && boxes.some(isCutOff);) {
      part *= 0.97;
      if (figure) figure.style.zoom = part;
      else root.style.fontSize = `${part * first}px`;
    }
  }

  // Go back to the page, to where the slide stands in it; the presenter's view closes.
  function leave() {
    if (isView) window.close();
    const slide = slides[place];
    place = null;
    delete document.body.dataset.talk;
    document.documentElement.style.fontSize = "";
    for (const box of document.querySelectorAll("#the-talk .live")) box.style.zoom = "";
    history.replaceState(null, "", `#${slide.id}`);
    slide.scrollIntoView();
  }

  // Begin with the slide whose heading the address names.
  const present = () => show(Math.max(0, slides.findIndex(({id}) => location.hash === `#${id}`)));

  function openView() {
    if (place === null) present();
    other = window.open(`#view-${place + 1}`, "mpgluon-talk", "width=1100,height=700");
  }

  // Whether what has the focus needs a key. PageUp and PageDown always move slides: a remote control sends them.
  function isTaken({key, target}) {
    if (["PageUp", "PageDown", "Escape"].includes(key)) return false;
    return target.closest(key === " " ? "input, select, button, a" : "input, select") !== null;
  }

  function onKey(event) {
    if (place === null || event.ctrlKey || event.altKey || event.metaKey || isTaken(event)) return;
    if (event.key === "Escape") leave();
    else if (event.key === "p" && !isView) openView();
    else if (event.key in MOVES) show(place + MOVES[event.key] * (event.shiftKey ? -1 : 1));
    else return;
    event.preventDefault();
  }

  // The other window moved, or asks where this one is (the presenter's view does, so that either can be loaded again).
  function onMessage({data, source}) {
    if (source === null || (source !== window.opener && source.opener !== window)) return;
    other = source;
    if (Number.isInteger(data.slide)) show(data.slide, false);
    else if (data.slide === "?" && place !== null) other.postMessage({slide: place}, "*");
  }

  // Show the slide that the address asks for.
  function read() {
    const asked = location.hash.match(/^#(?:slide|view)-(\d+)$/);
    if (asked) show(Number(asked[1]) - 1);
  }

  // Beside quotations, which need lines, there is more room for a picture than below them, unless it is wide.
  function placePictures() {
    for (const slide of slides) {
      const picture = slide.querySelector("blockquote ~ p > img");
      slide.classList.toggle("beside", picture !== null && picture.naturalWidth < 1.8 * picture.naturalHeight);
    }
    fit();
  }

  // Write the time since the presenter's view was opened.
  function tick() {
    const seconds = Math.floor((Date.now() - began) / 1000);
    clock.textContent = new Date(1000 * seconds).toISOString().slice(11, 19);
    other?.postMessage({slide: "?"}, "*");
  }

  for (const heading of headings) heading.tabIndex = -1;
  for (const slide of slides) [...slide.children].at(-1).classList.add("talk-notes");
  headings[0].parentElement.before(make("p", {className: "talk-start"}, button("Present", present), " ",
    button("Present with notes", openView)));
  document.body.append(bar, ...(isView ? [next, clock] : []));
  const sizes = new ResizeObserver(shrink);
  for (const slide of slides) for (const part of slide.children) sizes.observe(part);
  window.addEventListener("load", placePictures);
  window.addEventListener("resize", fit);
  window.addEventListener("keydown", onKey);
  window.addEventListener("message", onMessage);
  window.addEventListener("hashchange", read);
  read();
  if (isView) setInterval(tick, 1000);
  if (isView) tick();
})();
