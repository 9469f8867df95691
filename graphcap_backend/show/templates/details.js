// All that is known of the selected node.
function select(position) {
  state.selected = position;
  revealRow();
  drawRows();
  drawDetails();
  drawGraph();
}

function drawDetails() {
  const place = byId("details");
  if (state.selected === null) {
    place.replaceChildren(element("p", { class: "note" }, "Select a node to see all that is known of it."));
    return;
  }
  const node = data.nodes[state.selected];
  const name = data.names[node.name];
  place.replaceChildren(
    element("h3", {}, `${node.at} `, element("span", {}, shortName(node))),
    element("dl", {}, ...facts(node).map(([term, ...what]) => element("div", {}, element("dt", {}, term), element("dd", {}, ...what)))),
    ...frameList("Launched by", node.sources),
    ...frameList("Stack", node.stack === undefined ? [] : data.stacks[node.stack]),
    ...(node.annotation === undefined ? [] : [element("h4", {}, "Annotation"), element("pre", { tabindex: 0 }, data.annotations[node.annotation])]),
    ...(name.full === name.short ? [] : [element("h4", {}, "Full name"), element("pre", { tabindex: 0, class: "wrap" }, name.full)]),
  );
}

function facts(node) {
  const found = [["kind", node.kind.replaceAll("_", " ")]];
  if (data.graphs.length > 1) found.push(["graph", data.graphs[node.graph].name]);
  if (node.timing) {
    const [count, total, low, high] = node.timing;
    found.push(["time a call", timeText(total / data.numCalls)],
      ["runs", `${count.toLocaleString("en")}, mean ${timeText(total / count)}, ${timeText(low)} to ${timeText(high)}`]);
  }
  if (node.scopes) found.push(["scope", node.scopes.join(", ")]);
  if (node.modules) found.push(["modules", node.modules.join(", ")]);
  found.push(...Object.entries(node.facts ?? {}));
  const before = neighbours(node);
  if (before.length) found.push(["waits for", ...before.flatMap((each) => [jumpTo(each), " "])]);
  const after = node.depth ? [] : successors(node);
  if (after.length) found.push(["before", ...after.slice(0, 40).flatMap((each) => [jumpTo(each), " "])]);
  return found;
}

// Dependencies are indices in the node's own list: beside it in its body, or at the top.
function neighbours(node) {
  const outer = node.at.includes(".") ? node.at.slice(0, node.at.lastIndexOf(".") + 1) : "";
  const wanted = new Set((node.waits ?? []).map((index) => outer + index));
  if (!node.depth) return (node.waits ?? []).map((index) => topLevel[node.graph][index]).filter(Boolean);
  return data.nodes.filter((each) => each.graph === node.graph && wanted.has(each.at));
}

function successors(node) {
  return topLevel[node.graph].filter((each) => (each.waits ?? []).includes(Number(node.at)));
}

function jumpTo(node) {
  return element("button", { type: "button", class: "jump", title: shortName(node), onclick: () => select(node.position) }, node.at);
}

function frameList(title, frames) {
  if (!frames || !frames.length) return [];
  return [element("h4", {}, title), element("ol", { class: "frames" }, ...frames.map((id) => element("li", { title: frameFull(id) },
    element("span", {}, frameText(id), data.frames[id].function ? ` ${data.frames[id].function}` : ""),
    element("code", {}, frameCode(id)))))];
}
