// From the state to what is drawn: the tree of the chosen runs, its layout, and their numbers.
import type { Picture, Shown } from "./canvas";
import { FUNCTION_NAMES } from "./format";
import { layOut } from "./layout";
import type { Store } from "./store";
import { buildTree, findNode, textOf, type Tree, type TreeNode } from "./tree";
import type { Document, Run } from "./types";

export interface View {
  document: Document;
  tree: Tree;
  /** The runs of the chosen designs with the present seed; those from prefixes follow. */
  shown: Shown[];
  picture: Picture;
  selected: TreeNode | null;
  step: number;
}

const BRANCH = "#b8860b";

/** Remembers the tree and the layout, which change less often than the state. */
export class Viewer {
  private tree: { key: unknown[]; value: Tree } | null = null;
  private picture: { key: unknown[]; value: Picture } | null = null;

  view(store: Store, measure: (text: string) => number): View | null {
    const { state, document } = store;
    if (document === null) return null;
    const runs = store.shownRuns();
    const branches = store.branches();
    const overlaid = state.overlay ? state.chosen.flatMap((name) => store.runsOf(name)) : [];
    const treeKey = [document, state.overlay, ...runs, "branches", ...branches, "overlaid", ...overlaid];
    if (this.tree === null || !same(this.tree.key, treeKey)) {
      this.tree = { key: treeKey, value: buildTree(document, [...runs, ...branches], overlaid) };
    }
    const tree = this.tree.value;
    if (runs.length + branches.length + overlaid.length === 0) return null;
    const step = Math.min(state.step ?? tree.steps, tree.steps);
    const selected = state.selected === null ? null : findNode(tree, state.selected);
    const pictureKey = [tree, state.step, state.lost, selected, state.chosen.join()];
    if (this.picture === null || !same(this.picture.key, pictureKey)) {
      const shown = [
        ...runs.map((number) =>
          shownRun(document, tree, number, store.colour(document.runs[number]!.design), state.overlay, store),
        ),
        ...branches.map((number) => shownRun(document, tree, number, BRANCH, false, store)),
      ];
      const layout = layOut(
        tree,
        { step: state.step ?? Infinity, lost: state.lost, current: state.step, opened: selected },
        document.outputs,
        measure,
      );
      const functionName = FUNCTION_NAMES[document.scene.function] ?? "f";
      this.picture = {
        key: pictureKey,
        value: {
          layout,
          shown,
          outputs: document.outputs,
          functionName,
          step,
          selected,
          scene: document.scene,
        },
      };
    }
    const picture = this.picture.value;
    return { document, tree, shown: picture.shown, picture, selected, step };
  }
}

function shownRun(
  document: Document,
  tree: Tree,
  number: number,
  colour: string,
  overlay: boolean,
  store: Store,
): Shown {
  const run = document.runs[number]!;
  const masses = tree.masses.get(number) ?? [];
  const start = tree.beams.get(number)?.[0]?.[0];
  return {
    number,
    design: run.design,
    name: run.prefix.length > 0 && start ? `${run.design} after “${textOf(start)}”` : run.design,
    colour,
    masses,
    after: run.prefix.length,
    last: run.steps === null ? Infinity : run.prefix.length + masses.length,
    overlaid: overlay ? store.runsOf(run.design).length : 0,
    weights: new Map(run.y.map((output, i) => [output, { pi: run.pi[i]!, w: run.w[i]! }])),
  };
}

function same(one: unknown[], other: unknown[]): boolean {
  return one.length === other.length && one.every((value, i) => Object.is(value, other[i]));
}

/** How often a sequence came, and how often it should have. */
export interface Frequency {
  output: number;
  /** Mean number of copies in a run. */
  observed: number;
  /** Its inclusion probability, or expected copies; null if nobody knows. */
  expected: number | null;
  runs: number;
}

/**
 * The share of runs that drew each sequence, beside its inclusion probability.
 *
 * A path's π differs from run to run. Because 1/π has mean 1/P(drawn) over the runs that drew the
 * sequence, the harmonic mean of their π is what the frequency should be.
 */
export function frequencies(runs: Run[]): Frequency[] {
  const found = new Map<number, { copies: number; inverse: number; known: boolean; runs: number }>();
  for (const run of runs) {
    run.y.forEach((output, i) => {
      const entry = found.get(output) ?? { copies: 0, inverse: 0, known: true, runs: 0 };
      const pi = run.pi[i]!;
      entry.copies += run.count[i]!;
      entry.runs += 1;
      if (pi === null) entry.known = false;
      else entry.inverse += 1 / pi;
      found.set(output, entry);
    });
  }
  return [...found]
    .map(([output, entry]) => ({
      output,
      observed: entry.copies / runs.length,
      expected: entry.known ? entry.runs / entry.inverse : null,
      runs: entry.runs,
    }))
    .sort((a, b) => b.observed - a.observed || a.output - b.output);
}
