// Where the nodes of a tree stand: a row for every leaf, a column for every step.
import { cluster, hierarchy, type HierarchyPointNode } from "d3-hierarchy";
import { onOneLine } from "./labels";
import type { Tree, TreeNode } from "./tree";

export const ROW = 26;
export const LOST_ROW = 15;
export const HEADER = 46;
const GAP = 26;
const WIDEST = 170;
const PADDING = 14;

export interface Placed {
  node: TreeNode;
  x: number;
  y: number;
  width: number;
  height: number;
  kind: "kept" | "lost";
  /** Part of a character whose rest is the only child: it is drawn together with that. */
  joined: boolean;
  parent: Placed | null;
  children: Placed[];
}

export interface Layout {
  placed: Placed[];
  byNode: Map<TreeNode, Placed>;
  /** Where each column begins, and where the last one ends. */
  columns: number[];
  height: number;
  /** How wide the widest sequence at the right is. */
  textWidth: number;
}

export interface Filter {
  /** Nodes of later steps are left out. */
  step: number;
  /** How many of the likeliest dropped candidates are shown. */
  lost: number;
  /** Dropped candidates of this step are shown whatever their probability; null for none. */
  current: number | null;
  /** All candidates below this node are shown; null for none. */
  opened: TreeNode | null;
}

/** Chooses the nodes to show. */
export function chosenNodes(tree: Tree, filter: Filter): Map<TreeNode, "kept" | "lost"> {
  const chosen = new Map<TreeNode, "kept" | "lost">();
  const lost: TreeNode[] = [];
  for (const node of tree.nodes) {
    if (node.depth > filter.step) continue;
    if (node.parent === null || node.kept.size > 0 || node.drawn.size > 0 || node.output !== null) {
      chosen.set(node, "kept");
    } else if (node.lost.size > 0) {
      lost.push(node);
    }
  }
  // The path to an output of another run may have prefixes that no shown run has seen.
  for (const node of [...chosen.keys()]) {
    for (let up = node.parent; up !== null && !chosen.has(up); up = up.parent) chosen.set(up, "kept");
  }
  const shown = lost.filter((node) => chosen.has(node.parent!));
  const overall = likeliest(shown, filter.lost);
  const now = likeliest(
    shown.filter((node) => node.depth === filter.current),
    Math.max(filter.lost, 60),
  );
  for (const node of shown) {
    if (overall.has(node) || now.has(node) || node.parent === filter.opened) chosen.set(node, "lost");
  }
  return chosen;
}

function likeliest(nodes: TreeNode[], count: number): Set<TreeNode> {
  const order = Float64Array.from(nodes, (node) => -node.logP).sort();
  const least = count > 0 ? -(order[Math.min(count, order.length) - 1] ?? Infinity) : Infinity;
  return new Set(nodes.filter((node) => node.logP >= least).slice(0, count));
}

export function layOut(
  tree: Tree,
  filter: Filter,
  texts: { text: string }[],
  measure: (text: string) => number,
): Layout {
  const chosen = chosenNodes(tree, filter);
  const root = hierarchy(tree.root, (node) =>
    [...node.children.values()].filter((child) => chosen.has(child)).sort((a, b) => order(a, b, chosen)),
  );
  const rows = cluster<TreeNode>()
    .nodeSize([1, 1])
    // Neighbours with different parents need the room of these.
    .separation((a, b) =>
      a.parent === b.parent ? (rowOf(chosen.get(a.data)!) + rowOf(chosen.get(b.data)!)) / 2 : ROW,
    );
  const placedRoot = rows(root);
  const nodes = placedRoot.descendants();
  const widths: number[] = [];
  for (const { data } of nodes) {
    const width = data.parent === null ? 10 : Math.min(WIDEST, measure(shownLabel(data)) + PADDING);
    widths[data.depth] = Math.max(widths[data.depth] ?? 24, width);
  }
  // Steps that are not shown have columns too, so that one can go on to them.
  for (let depth = 0; depth <= tree.steps; depth++) widths[depth] ??= 24;
  const columns = [0];
  for (const width of widths) columns.push(columns.at(-1)! + (width ?? 24) + GAP);
  const top = nodes.reduce((least, node) => Math.min(least, node.x), Infinity);
  const bottom = nodes.reduce((most, node) => Math.max(most, node.x), -Infinity);
  const byNode = new Map<TreeNode, Placed>();
  const place = (point: HierarchyPointNode<TreeNode>): Placed => {
    const node = point.data;
    const kind = chosen.get(node)!;
    const only = point.children?.length === 1 ? point.children[0]!.data : null;
    const placed: Placed = {
      node,
      x: columns[node.depth]!,
      y: point.x - top + ROW,
      width: node.parent === null ? 10 : Math.min(WIDEST, measure(shownLabel(node)) + PADDING),
      height: kind === "lost" ? 13 : 19,
      kind,
      joined: node.label.partial && only !== null,
      parent: point.parent === null ? null : byNode.get(point.parent.data)!,
      children: [],
    };
    placed.parent?.children.push(placed);
    byNode.set(node, placed);
    return placed;
  };
  const textWidth = nodes.reduce(
    (most, { data }) =>
      data.output === null ? most : Math.max(most, measure(shortened(texts[data.output]!.text))),
    0,
  );
  return { placed: nodes.map(place), byNode, columns, height: bottom - top + 2 * ROW, textWidth };
}

/** The text of a sequence, if it is not too long to stand in a row. */
export function shortened(text: string): string {
  return cut(onOneLine(text), 60);
}

export function shownLabel(node: TreeNode): string {
  return cut(node.label.text, 24);
}

/** The first characters of a text, none of which is cut in two. */
function cut(text: string, most: number): string {
  if (text.length <= most) return text;
  const characters = [...text];
  return characters.length > most ? `${characters.slice(0, most - 1).join("")}…` : text;
}

function rowOf(kind: "kept" | "lost"): number {
  return kind === "lost" ? LOST_ROW : ROW;
}

function order(a: TreeNode, b: TreeNode, chosen: Map<TreeNode, "kept" | "lost">): number {
  const first = chosen.get(a) === "lost" ? 1 : 0;
  const second = chosen.get(b) === "lost" ? 1 : 0;
  return first - second || known(b.logP) - known(a.logP) || a.token - b.token;
}

function known(logP: number): number {
  return Number.isNaN(logP) ? -1e9 : logP;
}
