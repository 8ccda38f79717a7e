import assert from "node:assert/strict";
import { test } from "node:test";
import { labelOf, unfinished, visible } from "../src/labels";
import type { Piece } from "../src/types";

function labels(pieces: Piece[]): string[] {
  let pending: number[] = [];
  return pieces.map((piece) => {
    const label = labelOf(piece, pending, false);
    pending = label.pending;
    return label.partial ? `(${label.text})` : label.text;
  });
}

test("parts of a character are shown together with the token that completes it", () => {
  assert.deepEqual(labels([[0xc3], [0xa9]]), ["(C3)", "é"]);
  assert.deepEqual(labels([[0xf0, 0x9f], [0x9a], [0xb2], " ride"]), ["(F0 9F)", "(9A)", "🚲", "·ride"]);
});

test("a token may complete one character and begin the next", () => {
  assert.deepEqual(labels([[0xc3], [0xa9, 0xe6], [0x97, 0xa5]]), ["(C3)", "é", "日"]);
});

test("bytes that are no UTF-8 at all do not break the page", () => {
  assert.deepEqual(labels([[0xff], "a"]), ["�", "a"]);
  assert.deepEqual(labels([[0xc3], "a"]), ["(C3)", "�a"]);
});

test("spaces and line ends can be seen", () => {
  assert.equal(visible("  a b"), "··a b");
  assert.equal(visible("\n\t"), "↵⇥");
  assert.equal(visible(""), "∅");
});

test("the end of a sequence is called so", () => {
  assert.equal(labelOf("</s>", [], true).text, "end");
});

test("unfinished bytes are counted", () => {
  assert.equal(unfinished([0x41]), 0);
  assert.equal(unfinished([0xc3, 0xa9]), 0);
  assert.equal(unfinished([0xf0, 0x9f, 0x9a]), 3);
  assert.equal(unfinished([]), 0);
});
