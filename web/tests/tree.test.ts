import assert from "node:assert/strict";
import { test } from "node:test";
import { chosenNodes, layOut, shortened } from "../src/layout";
import { checked } from "../src/store";
import { buildTree, findNode, keyOf, merged, prefixOf, textOf } from "../src/tree";
import { ITSELF, type Document, type Run } from "../src/types";
import { frequencies } from "../src/view";

const P = Math.log;

/** Two steps: "a" (0.6) and "b" (0.3) are kept and "c" (0.1) is lost; then "a" ends, "b" dies. */
function run(change: Partial<Run> = {}): Run {
  return {
    design: "stratified",
    seed: 0,
    distinct: true,
    estimates: true,
    prefix: [],
    log_prefix: 0,
    y: [0],
    count: [1],
    pi: [0.5],
    w: [1],
    estimate: null,
    steps: [
      {
        parent: [0, 0],
        token: [1, 2],
        log_p: [P(0.6), P(0.3)],
        pi: [1, 0.75],
        count: [1, 1],
        done: [false, false],
        lost: { parent: [0], token: [3], log_p: [P(0.1)], pi: [0.25] },
        log_rest: [null],
      },
      {
        parent: [0],
        token: [9],
        log_p: [P(0.5)],
        pi: [0.5],
        count: [1],
        done: [true],
        lost: { parent: [0, 1], token: [1, 9], log_p: [P(0.08), P(0.25)], pi: [0.1, 0.3] },
        log_rest: [P(0.02), P(0.05)],
      },
      {
        parent: [0],
        token: [ITSELF],
        log_p: [P(0.5)],
        pi: [1],
        count: [1],
        done: [true],
        lost: { parent: [], token: [], log_p: [], pi: [] },
        log_rest: [null],
      },
    ],
    ...change,
  };
}

function sample(runs: Run[] = [run()]): Document {
  return {
    format: "cpsbs-explore",
    version: 1,
    model: "tiny",
    prompt: "x",
    scene: {
      text: "x",
      k: 2,
      temperature: 1,
      nucleus: null,
      max_length: 3,
      function: "length",
      argument: "",
    },
    pieces: { 1: " a", 2: " b", 3: " c", 9: "</s>" },
    ends: [9],
    outputs: [{ tokens: [1, 9], text: "a", log_p: P(0.5), finished: true, f: 2 }],
    runs,
    exact: null,
  };
}

test("a node is a prefix, with what the run did with it", () => {
  const tree = buildTree(sample(), [0], []);
  const a = findNode(tree, "1")!;
  const b = findNode(tree, "2")!;
  const end = findNode(tree, "1 9")!;
  assert.equal(tree.steps, 3);
  assert.deepEqual(a.kept.get(0), { pi: 1, count: 1, until: 3, forced: false, later: null });
  assert.deepEqual(b.kept.get(0), { pi: 0.75, count: 1, until: 1, forced: false, later: null });
  assert.deepEqual(findNode(tree, "3")!.lost.get(0), { pi: 0.25, step: 1 });
  assert.equal(end.output, 0);
  assert.equal(end.kept.get(0)!.until, 3);
  assert.deepEqual([...end.kept.get(0)!.later!], [[3, 1]]);
  assert.deepEqual(prefixOf(end), [1, 9]);
  assert.equal(keyOf(end), "1 9");
  assert.equal(textOf(end), "a");
  assert.equal(findNode(tree, "7"), null);
});

test("the text of a prefix has its own spaces, line ends and dots, and not the signs for them", () => {
  const document = sample();
  document.pieces = { ...document.pieces, 1: "·a  b\n  c" };
  const end = findNode(buildTree(document, [0], []), "1 9")!;
  assert.equal(end.parent!.label.text, "·a  b↵  c");
  assert.equal(textOf(end), "·a  b\n  c");
});

test("the bytes of a character that is not complete are all told", () => {
  const document = sample();
  document.pieces = { ...document.pieces, 1: [0xf0], 9: [0x9f] };
  document.ends = [];
  const end = findNode(buildTree(document, [0], []), "1 9")!;
  assert.equal(end.label.text, "9F");
  assert.equal(textOf(end), "F0 9F");
});

test("a text is cut between characters, and its spaces stay", () => {
  assert.equal(shortened("a  b\nc"), "a  b↵c");
  assert.equal(shortened("🚲".repeat(60)), "🚲".repeat(60));
  assert.equal(shortened("🚲".repeat(61)), `${"🚲".repeat(59)}…`);
});

test("each step accounts for all probability that was there", () => {
  const [first, second] = buildTree(sample(), [0], []).masses.get(0)!;
  assert.ok(Math.abs(first!.kept - 0.9) < 1e-9 && Math.abs(first!.dropped - 0.1) < 1e-9);
  assert.ok(Math.abs(second!.kept + second!.dropped - 0.9) < 1e-9);
});

test("overlaid runs are counted along their sequences", () => {
  const document = sample([
    run(),
    run({ seed: 1, steps: null }),
    run({ seed: 2, steps: null, y: [], count: [], pi: [], w: [] }),
  ]);
  const tree = buildTree(document, [0], [0, 1, 2]);
  assert.equal(findNode(tree, "1")!.drawn.get("stratified"), 2);
  assert.equal(tree.root.drawn.get("stratified"), 2);
  assert.equal(findNode(tree, "2")!.drawn.size, 0);
});

test("a branch hangs below its prefix", () => {
  const branch = run({ prefix: [2], log_prefix: P(0.3), y: [], count: [], pi: [], w: [] });
  branch.steps = [{ ...branch.steps![0]!, log_p: [P(0.2), P(0.05)] }];
  const tree = buildTree(sample([run(), branch]), [0, 1], []);
  assert.equal(findNode(tree, "2 1")!.kept.has(1), true);
  assert.equal(tree.masses.get(1)!.length, 1);
});

test("the likeliest dropped candidates are shown, and all of the step that is looked at", () => {
  const tree = buildTree(sample(), [0], []);
  const names = (lost: number, step: number, current: number | null) =>
    [...chosenNodes(tree, { step, lost, current, opened: null })]
      .filter(([, kind]) => kind === "lost")
      .map(([node]) => keyOf(node));
  assert.deepEqual(names(0, Infinity, null), []);
  assert.deepEqual(names(1, Infinity, null), ["2 9"]);
  assert.deepEqual(names(0, 1, 1), ["3"]);
});

test("every leaf has a row of its own, and children stand to the right", () => {
  const layout = layOut(
    buildTree(sample(), [0], []),
    { step: Infinity, lost: 9, current: null, opened: null },
    sample().outputs,
    (t) => 7 * t.length,
  );
  const leaves = layout.placed.filter((placed) => placed.children.length === 0);
  assert.equal(new Set(leaves.map((placed) => placed.y)).size, leaves.length);
  for (const placed of layout.placed)
    if (placed.parent) assert.ok(placed.x > placed.parent.x + placed.parent.width);
});

test("documents are joined, and a run with steps replaces one without", () => {
  const other = sample([run({ steps: null }), run({ seed: 5 })]);
  other.outputs = [
    { tokens: [2, 9], text: "b", log_p: P(0.2), finished: true, f: 2 },
    { tokens: [1, 9], text: "a", log_p: P(0.5), finished: true, f: 2 },
  ];
  other.runs = other.runs.map((own) => ({ ...own, y: [1] }));
  const joined = merged(other, sample());
  assert.equal(joined.outputs.length, 2);
  assert.deepEqual(
    joined.runs.map((own) => [own.seed, own.y, own.steps === null]),
    [
      [0, [1], false],
      [5, [1], false],
    ],
  );
});

test("the harmonic mean of π is compared with the share of the runs", () => {
  const runs = [run({ pi: [0.5] }), run({ pi: [0.25] }), run({ y: [], pi: [], count: [], w: [] })];
  const [row] = frequencies(runs);
  assert.ok(Math.abs(row!.observed - 2 / 3) < 1e-12);
  assert.ok(Math.abs(row!.expected! - 1 / 3) < 1e-12);
});

test("files that are no runs are refused", () => {
  assert.throws(() => checked(null), /not saved by/);
  assert.throws(() => checked({ format: "other" }), /not saved by/);
  assert.throws(() => checked({ ...sample(), version: 2 }), /version 2/);
  assert.throws(() => checked({ ...sample(), runs: [{ ...run(), y: [7] }] }), /damaged/);
  assert.throws(() => checked({ ...sample(), outputs: [{}] }), /damaged/);
  assert.throws(() => checked({ ...sample(), pieces: null }), /damaged/);
  assert.throws(() => checked({ ...sample(), scene: { ...sample().scene, function: "eval" } }), /damaged/);
  const wrong = run();
  wrong.steps![1]!.parent = [7];
  assert.throws(() => checked({ ...sample(), runs: [wrong] }), /damaged/);
  assert.deepEqual(checked(sample()), sample());
});
