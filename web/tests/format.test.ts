import assert from "node:assert/strict";
import { test } from "node:test";
import { number, percent, plural, probability } from "../src/format";
import { partialSums } from "../src/panels/estimate";
import { spread } from "../src/panels/designs";
import type { Document, Run } from "../src/types";

test("numbers are short", () => {
  assert.equal(number(0.123456), "0.123");
  assert.equal(number(0), "0");
  assert.equal(number(null), "–");
  assert.equal(number(NaN), "–");
  assert.equal(number(0.0000123), "1.2 e-5");
});

test("probabilities too small for a float are still numbers", () => {
  assert.equal(probability(Math.log(0.5)), "0.5");
  assert.equal(probability(-1000), "5.1 e-435");
  assert.equal(probability(null), "–");
});

test("shares are percentages", () => {
  assert.equal(percent(0.5), "50%");
  assert.equal(percent(0.0001), "<0.1%");
  assert.equal(percent(0), "0%");
  assert.equal(plural(1, "run"), "1 run");
  assert.equal(plural(1200, "run"), "1,200 runs");
});

test("partial sums end at the estimate", () => {
  const document = { outputs: [{ f: 0.5 }, { f: 1 }, { f: null }] } as Document;
  const run = { y: [0, 1, 2], w: [0.4, 0.6, 0.1] } as Run;
  assert.deepEqual(partialSums(document, run), [0, 0.6, 0.8]);
});

test("the spread of too few runs is not known", () => {
  const run = (value: number) => ({ estimate: { value } }) as Run;
  assert.equal(spread([run(1), run(2)]), null);
  assert.equal(spread([run(1), run(2), run(3)]), 1);
});
