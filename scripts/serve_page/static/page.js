// Sends a photograph as it is, and shows what the two networks answer.

const element = (id) => document.getElementById(id);
const maxBytes = Number(document.body.dataset.maxBytes);
const centreCrop = Number(document.body.dataset.centreCrop);
let waitingFor = null;

element("file").addEventListener("change", (event) => {
  const [file] = event.target.files;
  event.target.value = ""; // so that the same file can be chosen again
  if (file) classify(file);
});

// Anywhere on the page: a photograph that misses the frame would replace the page.
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    document.body.classList.toggle("dragging", name === "dragover");
    const [file] = name === "drop" ? event.dataTransfer.files : [];
    if (file) classify(file);
  });
}

// Makes the photograph as large as fits, and marks the central square, whose side is a share of the
// photograph's shorter one.
element("preview").addEventListener("load", ({ target: { naturalWidth, naturalHeight } }) => {
  const side = Math.min(naturalWidth, naturalHeight) * centreCrop;
  const width = (100 * side) / naturalWidth;
  const height = (100 * side) / naturalHeight;
  element("frame").style.width = `min(100%, ${(26 * naturalWidth) / naturalHeight}rem)`;
  Object.assign(element("crop").style, {
    width: `${width}%`,
    height: `${height}%`,
    left: `${(100 - width) / 2}%`,
    top: `${(100 - height) / 2}%`,
  });
});

async function classify(file) {
  waitingFor?.abort();
  const request = new AbortController();
  waitingFor = request;
  clear();
  if (file.size > maxBytes) {
    refuse(`the file is larger than ${maxBytes / 2 ** 20} MiB`);
    return;
  }
  document.body.classList.add("waiting");
  element("summary").textContent = `Looking at ${file.name} …`;
  try {
    const options = { method: "POST", body: file, signal: request.signal };
    const response = await fetch("classify", options);
    const answer = await response.json();
    if (request.signal.aborted) return;
    if (response.ok) show(file, answer.predictions);
    else refuse(answer.error);
  } catch (error) {
    // An aborted request has a successor, which shows its own answer.
    if (!request.signal.aborted) refuse(`the file could not be sent, or the server does not answer (${error.message})`);
  }
  if (waitingFor === request) document.body.classList.remove("waiting");
}

function clear() {
  document.body.classList.remove("waiting");
  URL.revokeObjectURL(element("preview").src);
  element("preview").removeAttribute("src");
  for (const id of ["error", "frame", "caption"]) element(id).hidden = true;
  element("invitation").hidden = false;
  for (const list of document.querySelectorAll(".card ol")) list.replaceChildren();
  for (const text of document.querySelectorAll(".latency")) text.textContent = "\u00a0";
}

function refuse(message) {
  element("summary").textContent = "No answer for this file.";
  element("error").textContent = `${message[0].toUpperCase()}${message.slice(1)}.`;
  element("error").hidden = false;
}

function show(file, predictions) {
  element("preview").src = URL.createObjectURL(file);
  element("preview").alt = file.name;
  element("invitation").hidden = true;
  for (const id of ["frame", "caption"]) element(id).hidden = false;
  element("summary").textContent = summaryOf(predictions);
  for (const { dtype, latency_ms, guesses } of predictions) {
    const card = element(dtype);
    const text = `${latency_ms.toFixed(1)} ms, median of 5 calls`;
    card.querySelector(".latency").textContent = text;
    const items = guesses.length ? guesses.map(itemOf) : ["The logits are not finite."];
    card.querySelector("ol").replaceChildren(...items);
  }
}

function summaryOf(predictions) {
  const [[first], [second]] = predictions.map(({ guesses }) => guesses);
  const [one, other] = predictions.map(({ dtype }) => dtype);
  if (!first || !second) return `${first ? other : one} has no answer: its numbers overflowed.`;
  if (first.category !== second.category) {
    return `They disagree: ${one} says ${first.category}, ${other} says ${second.category}.`;
  }
  const difference = 100 * Math.abs(first.probability - second.probability);
  const apart = difference < 0.005 ? "less than 0.01" : difference.toFixed(2);
  return `Both say ${first.category}; their probabilities are ${apart} percentage points apart.`;
}

function itemOf({ category, probability }) {
  const item = document.createElement("li");
  const percent = `${(100 * probability).toFixed(2)} %`;
  for (const [name, text] of [["category", category], ["probability", percent], ["bar", ""]]) {
    const part = document.createElement("span");
    part.className = name;
    part.textContent = text;
    item.append(part);
  }
  const filled = document.createElement("span");
  filled.style.width = `${100 * probability}%`;
  item.lastChild.setAttribute("aria-hidden", "true");
  item.lastChild.append(filled);
  return item;
}
