// The tree of prefixes: one node a prefix, whatever number of runs went through it.
import { hexadecimal, labelOf, type Label } from "./labels";
import { ITSELF, type Document, type Run, type Step } from "./types";

/** What one run did with a prefix. */
export interface Seen {
  /** The inclusion probability at the step that offered it; expected copies if they may repeat. */
  pi: number | null;
  count: number;
  /** The last step after which it was in the beam, itself or by something that extends it. */
  until: number;
  /** Whether the user forced it. */
  forced: boolean;
  /** The inclusion probabilities at the steps after it had ended, by step. */
  later: Map<number, number | null> | null;
}

/** What one run did with a prefix that it did not keep. */
export interface Lost {
  pi: number | null;
  step: number;
}

export interface TreeNode {
  id: number;
  parent: TreeNode | null;
  token: number;
  /** The number of tokens of the prefix; the step that offered it. */
  depth: number;
  label: Label;
  isEnd: boolean;
  logP: number;
  children: ReadonlyMap<number, TreeNode>;
  /** By the number of the run. */
  kept: ReadonlyMap<number, Seen>;
  lost: ReadonlyMap<number, Lost>;
  /** By the number of the run: log p of all extensions that are neither kept nor listed. */
  logRest: ReadonlyMap<number, number>;
  /** The number of the output that ends here, or null. */
  output: number | null;
  /** How many runs of each design have an output below this prefix, where runs are overlaid. */
  drawn: ReadonlyMap<string, number>;
}

/** Most nodes are candidates that lost, and need one of their five maps. */
const EMPTY: ReadonlyMap<any, any> = new Map();

/** The map with one more entry: a new one if it is the first. */
function put<K, V>(map: ReadonlyMap<K, V>, key: K, value: V): ReadonlyMap<K, V> {
  if ((map as ReadonlyMap<unknown, unknown>) === EMPTY) return new Map([[key, value]]);
  return (map as Map<K, V>).set(key, value);
}

export interface StepMass {
  kept: number;
  dropped: number;
}

export interface Tree {
  root: TreeNode;
  nodes: TreeNode[];
  /** The nodes that end an output, by the number of the output. */
  leaves: Map<number, TreeNode>;
  /** For every run with steps: the nodes in its beam after each step; the first is the root. */
  beams: Map<number, TreeNode[][]>;
  /** For every run with steps: probability kept and dropped at each step. */
  masses: Map<number, StepMass[]>;
  /** The number of steps of the longest run. */
  steps: number;
}

/** Builds the tree of some runs of a document, and counts how often others went through it. */
export function buildTree(document: Document, shown: number[], overlaid: number[]): Tree {
  const ends = new Set(document.ends);
  const nodes: TreeNode[] = [];

  function newNode(parent: TreeNode | null, token: number, logP: number): TreeNode {
    const piece = document.pieces[String(token)];
    const isEnd = ends.has(token);
    const node: TreeNode = {
      id: nodes.length,
      parent,
      token,
      depth: parent === null ? 0 : parent.depth + 1,
      label:
        parent === null
          ? { text: "", plain: "", partial: false, pending: [] }
          : labelOf(piece, parent.label.pending, isEnd),
      isEnd,
      logP,
      children: EMPTY,
      kept: EMPTY,
      lost: EMPTY,
      logRest: EMPTY,
      output: null,
      drawn: EMPTY,
    };
    nodes.push(node);
    if (parent !== null) parent.children = put(parent.children, token, node);
    return node;
  }

  function child(parent: TreeNode, token: number, logP: number): TreeNode {
    if (token === ITSELF) return parent;
    const found = parent.children.get(token);
    if (found === undefined) return newNode(parent, token, logP);
    if (Number.isNaN(found.logP)) found.logP = logP;
    return found;
  }

  /** The node of a sequence; the probabilities of prefixes that no step has told are not known. */
  function walk(tokens: number[]): TreeNode {
    let node = root;
    for (const token of tokens) node = child(node, token, NaN);
    return node;
  }

  const root = newNode(null, ITSELF, 0);
  const tree: Tree = { root, nodes, leaves: new Map(), beams: new Map(), masses: new Map(), steps: 0 };

  for (const number of shown) {
    const run = document.runs[number]!;
    const start = walk(run.prefix);
    if (Number.isNaN(start.logP)) start.logP = run.log_prefix;
    let beam = [start];
    start.kept = put(start.kept, number, {
      pi: 1,
      count: 1,
      until: start.depth,
      forced: run.prefix.length > 0,
      later: null,
    });
    const beams = [beam];
    const masses: StepMass[] = [];
    for (const step of run.steps ?? []) {
      const after: TreeNode[] = [];
      const depth = run.prefix.length + beams.length;
      step.token.forEach((token, i) => {
        const node = child(beam[step.parent[i]!]!, token, step.log_p[i]!);
        const seen = node.kept.get(number);
        if (seen === undefined) {
          const now = { pi: step.pi[i]!, count: step.count[i]!, until: depth, forced: false, later: null };
          node.kept = put(node.kept, number, now);
        } else {
          seen.until = depth;
          (seen.later ??= new Map()).set(depth, step.pi[i]!);
        }
        after.push(node);
      });
      step.lost.token.forEach((token, i) => {
        const node = child(beam[step.lost.parent[i]!]!, token, step.lost.log_p[i]!);
        node.lost = put(node.lost, number, { pi: step.lost.pi[i]!, step: depth });
      });
      beam.forEach((node, i) => {
        const logRest = step.log_rest[i];
        if (logRest != null) node.logRest = put(node.logRest, number, logRest);
      });
      masses.push(massOf(step));
      for (const node of after)
        for (let up = node.parent; up !== null; up = up.parent) {
          const seen = up.kept.get(number);
          if (seen === undefined || seen.until >= depth) break;
          seen.until = depth;
        }
      beam = after;
      beams.push(beam);
    }
    tree.beams.set(number, beams);
    tree.masses.set(number, masses);
    tree.steps = Math.max(tree.steps, run.prefix.length + masses.length);
  }
  for (const number of [...shown, ...overlaid]) {
    const run = document.runs[number]!;
    const isKept = run.steps === null && shown.includes(number);
    for (const output of run.y) {
      const end = leaf(output);
      // Nothing is known of the steps of such a run but that these prefixes were kept.
      for (let up: TreeNode | null = end; isKept && up !== null; up = up.parent) {
        up.kept = put(up.kept, number, { pi: null, count: 1, until: Infinity, forced: false, later: null });
      }
    }
  }
  for (const number of overlaid) {
    const run = document.runs[number]!;
    const through = new Set<TreeNode>();
    for (const output of run.y) {
      for (let node: TreeNode | null = leaf(output); node !== null; node = node.parent) through.add(node);
    }
    for (const node of through) {
      node.drawn = put(node.drawn, run.design, (node.drawn.get(run.design) ?? 0) + 1);
    }
  }
  return tree;

  function leaf(output: number): TreeNode {
    const { tokens, log_p } = document.outputs[output]!;
    const node = walk(tokens);
    node.logP = log_p;
    node.output = output;
    tree.leaves.set(output, node);
    tree.steps = Math.max(tree.steps, node.depth);
    return node;
  }
}

function massOf(step: Step): StepMass {
  const sum = (values: (number | null)[]) =>
    values.reduce<number>((total, value) => total + (value === null ? 0 : Math.exp(value)), 0);
  return { kept: sum(step.log_p), dropped: sum(step.lost.log_p) + sum(step.log_rest) };
}

export function prefixOf(node: TreeNode): number[] {
  const tokens: number[] = [];
  for (let at = node; at.parent !== null; at = at.parent) tokens.push(at.token);
  return tokens.reverse();
}

/** A name of the node that stays the same when the tree is built again. */
export function keyOf(node: TreeNode): string {
  return prefixOf(node).join(" ");
}

export function findNode(tree: Tree, key: string): TreeNode | null {
  let node: TreeNode | undefined = tree.root;
  if (key === "") return node;
  for (const token of key.split(" ")) {
    node = node.children.get(Number(token));
    if (node === undefined) return null;
  }
  return node;
}

/** The text of a prefix, as its labels show it; bytes of a character that is not complete are in hexadecimal. */
export function textOf(node: TreeNode): string {
  const parts: string[] = [];
  for (let at: TreeNode | null = node; at?.parent; at = at.parent) {
    if (!at.isEnd) parts.push(at.label.plain);
  }
  const text = parts.reverse().join("").trim();
  return node.label.partial ? `${text} ${hexadecimal(node.label.pending)}`.trim() : text;
}

/** Joins documents of the same scene; runs that are there already are replaced by fuller ones. */
export function merged(one: Document | null, other: Document): Document {
  if (one === null) return other;
  const outputs = [...one.outputs];
  const known = new Map(outputs.map((output, i) => [output.tokens.join(" "), i]));
  const renumbered = other.outputs.map((output) => {
    const key = output.tokens.join(" ");
    const found = known.get(key);
    if (found !== undefined) return found;
    known.set(key, outputs.length);
    return outputs.push(output) - 1;
  });
  const runs = [...one.runs];
  for (const run of other.runs) {
    const own: Run = { ...run, y: run.y.map((i) => renumbered[i]!) };
    const at = runs.findIndex((old) => sameRun(old, own));
    if (at < 0) runs.push(own);
    else if (runs[at]!.steps === null) runs[at] = own;
  }
  return {
    ...one,
    outputs,
    runs,
    pieces: { ...one.pieces, ...other.pieces },
    exact: other.exact ?? one.exact,
  };
}

function sameRun(one: Run, other: Run): boolean {
  return (
    one.design === other.design && one.seed === other.seed && one.prefix.join(" ") === other.prefix.join(" ")
  );
}
