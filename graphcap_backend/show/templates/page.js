// Puts it all together.
function choices(place, options) {
  place.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
}

function onChange(id, name, type = String) {
  byId(id).addEventListener("change", (event) => {
    state[name] = type(event.target.value);
    if (name === "graph") state.selected = null;
    drawAll();
  });
}

function drawAll() {
  drawTabs();
  drawShares();
  drawTable();
  drawDetails();
  drawGraph();
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
}

function start() {
  byId("theme").addEventListener("click", switchTheme);
  if (!data.graphs.length) return;
  for (const id of ["lines", "nodes", "graph-section"]) byId(id).hidden = false;
  choices(byId("graph"), [[-1, "all together"], ...data.graphs.map((graph, at) => [at, graph.name + (timeOfGraph[at] ? ` (${timeText(timeOfGraph[at] / data.numCalls)})` : "")])]);
  byId("graph").value = state.graph;
  byId("graph-choice").hidden = data.graphs.length === 1;
  byId("measure-choice").hidden = data.clock === null;
  choices(byId("kind"), [["", "all"], ...[...new Set(data.nodes.map((node) => node.kind))].sort().map((kind) => [kind, kind.replaceAll("_", " ")])]);
  onChange("graph", "graph", Number);
  onChange("measure", "measure");
  onChange("kind", "kind");
  byId("query").addEventListener("input", (event) => {
    state.query = event.target.value;
    byId("grid").scrollTop = 0;
    drawTable();
  });
  byId("grid").addEventListener("scroll", drawRows, { passive: true });
  byId("grid").addEventListener("keydown", moveInTable);
  byId("drawing").addEventListener("keydown", moveInDrawing);
  byId("earlier").addEventListener("click", () => turnDrawing(-1));
  byId("later").addEventListener("click", () => turnDrawing(1));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.target.matches("input, select, textarea")) return;
    event.preventDefault();
    byId("query").focus();
  });
  addEventListener("resize", () => { drawRows(); drawGraph(); });
  drawAll();
}

start();
