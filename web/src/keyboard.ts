// Moves along the tree by keys, and says in words where one is.
import { plural, probability } from "./format";
import type { Placed } from "./layout";
import type { TreeNode } from "./tree";
import type { View } from "./view";

/** The node to which a key leads from the selected one, or null. */
export function move(view: View, key: string): TreeNode | null {
  const { layout, selected } = view.picture;
  const at = selected === null ? undefined : layout.byNode.get(selected);
  if (at === undefined) return key.startsWith("Arrow") ? (layout.placed[0]?.children[0]?.node ?? null) : null;
  switch (key) {
    case "ArrowLeft":
      return at.parent !== null && at.parent.parent !== null ? at.parent.node : null;
    case "ArrowRight":
      return at.children[0]?.node ?? null;
    case "ArrowUp":
      return beside(layout.placed, at, -1);
    case "ArrowDown":
      return beside(layout.placed, at, 1);
    case "Home":
      return layout.placed[0]?.children[0]?.node ?? null;
    default:
      return null;
  }
}

/** The next node above or below in the same column. */
function beside(placed: Placed[], at: Placed, direction: number): TreeNode | null {
  let found: Placed | null = null;
  for (const other of placed) {
    if (other.node.depth !== at.node.depth || direction * (other.y - at.y) <= 0) continue;
    if (found === null || Math.abs(other.y - at.y) < Math.abs(found.y - at.y)) found = other;
  }
  return found?.node ?? null;
}

/** The selected node, for those who hear the page. */
export function describe(view: View): string {
  const node = view.selected;
  if (node === null || node.parent === null) {
    return `${plural(view.tree.leaves.size, "sequence")} in ${plural(view.tree.steps, "step")}.`;
  }
  const fates = view.shown.map((run) => {
    if (node.lost.has(run.number)) return `dropped by ${run.design}`;
    return node.kept.has(run.number) ? `kept by ${run.design}` : `not seen by ${run.design}`;
  });
  const token = node.isEnd ? "end of the sequence" : `“${node.label.text}”`;
  return `${token}, step ${node.depth}, probability ${probability(node.logP)}, ${fates.join(", ")}, ${plural(node.children.size, "continuation")}.`;
}
