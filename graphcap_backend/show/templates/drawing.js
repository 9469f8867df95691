// The graph drawn: layers by longest path, in columns like those of a newspaper where a chain is long.
const MOST_DRAWN = 300;
const BOX = { width: 178, height: 42, across: 198, down: 62, margin: 26 };
let drawnFrom = 0; // the first drawn node, in a graph with more than MOST_DRAWN
let lastDrawn = ""; // which nodes are drawn; a new selection alone changes classes only

function drawnGraph() {
  if (state.selected !== null) return data.nodes[state.selected].graph;
  return state.graph === -1 ? heaviestGraph : state.graph;
}

function drawGraph() {
  const graph = drawnGraph();
  const nodes = topLevel[graph];
  const selected = state.selected === null ? null : Number(data.nodes[state.selected].at.split(".")[0]);
  if (selected !== null && (selected < drawnFrom || selected >= drawnFrom + MOST_DRAWN)) drawnFrom = selected - MOST_DRAWN / 2;
  drawnFrom = Math.max(0, Math.min(drawnFrom, nodes.length - MOST_DRAWN));
  const place = byId("drawing");
  const key = [graph, drawnFrom, place.clientWidth, state.measure].join();
  if (key !== lastDrawn) {
    lastDrawn = key;
    const shown = nodes.slice(drawnFrom, drawnFrom + MOST_DRAWN);
    drawGraphNote(graph, shown.length, nodes.length);
    place.replaceChildren(picture(shown, placed(shown, place.clientWidth)));
  }
  markDrawn(graph, selected);
}

function drawGraphNote(graph, number, all) {
  const name = data.graphs.length > 1 ? `${data.graphs[graph].name}: ` : "";
  byId("drawing-note").textContent = name + (number === all ? counted(all, "node")
    : `nodes ${drawnFrom.toLocaleString("en")} to ${(drawnFrom + number - 1).toLocaleString("en")} of ${all.toLocaleString("en")}`);
  byId("earlier").parentElement.hidden = number === all;
  byId("earlier").disabled = drawnFrom === 0;
  byId("later").disabled = drawnFrom + number >= all;
}

function turnDrawing(by) {
  state.selected = null;
  drawnFrom += by * MOST_DRAWN;
  drawRows();
  drawDetails();
  drawGraph();
  byId("drawing").scrollTop = 0;
}

function placed(nodes, width) {
  const places = new Map(); // index -> {layer, lane}
  const layers = [];
  for (const node of nodes) {
    const before = (node.waits ?? []).map((index) => places.get(index)).filter(Boolean);
    const layer = before.length ? Math.max(...before.map((place) => place.layer)) + 1 : 0;
    const wish = before.length ? before.reduce((total, place) => total + place.wish, 0) / before.length : 0;
    const place = { layer, wish, lane: 0 };
    places.set(Number(node.at), place);
    (layers[layer] ??= []).push(place);
    // Lanes as they are known so far: what comes later only needs to know where its parents are.
    place.wish = Math.max(wish, ...layers[layer].slice(0, -1).map((other) => other.wish + 1));
  }
  let lanes = 1;
  for (const layer of layers) {
    layer.sort((one, other) => one.wish - other.wish);
    layer.forEach((place, at) => { place.lane = Math.max(Math.floor(place.wish), at ? layer[at - 1].lane + 1 : 0); });
    lanes = Math.max(lanes, layer.at(-1).lane + 1);
  }
  const blockWidth = lanes * BOX.across;
  const fitting = Math.max(1, Math.floor((width - 2 * BOX.margin) / blockWidth));
  const perBlock = Math.ceil(layers.length / Math.min(fitting, Math.ceil(layers.length / 16)));
  for (const place of places.values()) {
    const block = Math.floor(place.layer / perBlock);
    place.x = BOX.margin + block * blockWidth + place.lane * BOX.across;
    place.y = BOX.margin + (place.layer % perBlock) * BOX.down;
  }
  const used = Math.ceil(layers.length / perBlock);
  return { places, width: 2 * BOX.margin + used * blockWidth, height: 2 * BOX.margin + Math.min(perBlock, layers.length) * BOX.down };
}

function picture(nodes, { places, width, height }) {
  const heaviest = Math.max(...nodes.map(weightOf), 0);
  const edges = nodes.flatMap((node) => (node.waits ?? []).filter((index) => places.has(index)).map((index) => svg("path", {
    class: "edge", d: edgePath(places.get(index), places.get(Number(node.at))), "data-from": index, "data-to": node.at,
  })));
  const boxes = nodes.map((node) => box(node, places.get(Number(node.at)), state.measure === "time" && heaviest ? weightOf(node) / heaviest : 0));
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` },
    svg("g", {}, ...edges), svg("g", {}, ...boxes));
}

function edgePath(from, to) {
  const [x1, y1] = [from.x + BOX.width / 2, from.y + BOX.height];
  const [x2, y2] = [to.x + BOX.width / 2, to.y];
  const gap = BOX.down - BOX.height;
  if (to.layer === from.layer + 1 && y2 > y1) return `M${x1} ${y1}C${x1} ${y1 + gap} ${x2} ${y2 - gap} ${x2} ${y2}`;
  // Beside the boxes: past layers between, or over to the next column.
  const lane = y2 > y1 && x1 === x2 ? x1 + BOX.width / 2 + 10 : Math.max(x1, x2) - BOX.across / 2;
  return `M${x1} ${y1}C${x1} ${y1 + gap} ${lane} ${y1} ${lane} ${y1 + gap}L${lane} ${y2 - gap}C${lane} ${y2} ${x2} ${y2 - gap} ${x2} ${y2}`;
}

function box(node, { x, y }, heat) {
  const value = state.measure === "time" && node.timing ? timeText(weightOf(node)) : "";
  const line = cut(lineText(node), value ? 22 - value.length : 25);
  const below = [line, value].filter(Boolean).join(" · ") || node.kind.replaceAll("_", " ");
  const rect = svg("rect", { width: BOX.width, height: BOX.height, rx: 5 });
  rect.style.setProperty("--heat", `${Math.round(70 * heat)}%`);
  return svg("g", { class: `box ${node.kind}`, transform: `translate(${x} ${y})`, "data-node": node.at, onclick: () => select(node.position) },
    svg("title", {}, `${node.at} ${data.names[node.name].full}\n${(node.sources ?? []).map(frameFull).join("\n")}`),
    rect,
    svg("text", { x: 9, y: 17, class: "name" }, cut(`${node.at} ${shortName(node)}`, 23)),
    svg("text", { x: 9, y: 33, class: "below" }, below));
}

const cut = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);

function markDrawn(graph, selected) {
  const place = byId("drawing");
  for (const old of place.querySelectorAll(".selected, .near")) old.classList.remove("selected", "near");
  if (selected === null) return;
  for (const edge of place.querySelectorAll(`[data-from="${selected}"], [data-to="${selected}"]`)) edge.classList.add("near");
  const chosen = place.querySelector(`[data-node="${selected}"]`);
  if (!chosen) return;
  chosen.classList.add("selected");
  const [x, y] = chosen.getAttribute("transform").match(/[\d.]+/g).map(Number);
  const [right, bottom] = [x + BOX.width + BOX.margin, y + BOX.height + BOX.margin];
  if (x < place.scrollLeft) place.scrollLeft = x - BOX.margin;
  if (right > place.scrollLeft + place.clientWidth) place.scrollLeft = right - place.clientWidth;
  if (y < place.scrollTop) place.scrollTop = y - BOX.margin;
  if (bottom > place.scrollTop + place.clientHeight) place.scrollTop = bottom - place.clientHeight;
}

function moveInDrawing(event) {
  const node = state.selected === null ? null : data.nodes[state.selected];
  const nodes = topLevel[drawnGraph()];
  if (!["ArrowDown", "ArrowUp", "ArrowLeft", "ArrowRight"].includes(event.key)) return;
  event.preventDefault();
  if (node === null) {
    if (nodes.length) select(nodes[drawnFrom].position);
    return;
  }
  const outer = nodes[Number(node.at.split(".")[0])];
  const index = Number(outer.at);
  // Along the edges with up and down; in launch order with left and right, so that every node can be reached.
  const to = { ArrowDown: successors(outer)[0], ArrowUp: neighbours(outer).at(-1), ArrowLeft: nodes[index - 1], ArrowRight: nodes[index + 1] }[event.key];
  if (to) select(to.position);
}
