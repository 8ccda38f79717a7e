// The prefix that is selected: its numbers, why it was kept or dropped, and what could follow it.
import { number, percent, plural, probability } from "../format";
import type { Shown } from "../canvas";
import type { Store } from "../store";
import { keyOf, prefixOf, textOf, type TreeNode } from "../tree";
import type { View } from "../view";

export function Inspector({ store, view }: { store: Store; view: View }) {
  const node = view.selected;
  if (node === null || node.parent === null) {
    return (
      <p class="hint">
        Select a token in the tree to see its numbers, why it was kept or dropped, and to go on from it.
      </p>
    );
  }
  const canBranch = store.hasServer && !node.isEnd;
  const next = [...node.children.values()].sort((a, b) => b.logP - a.logP).slice(0, 12);
  return (
    <section class="inspector" aria-label="Selected prefix">
      <h2>
        “{textOf(node) || node.label.text}” {node.isEnd && <small>(ended)</small>}
      </h2>
      <p>
        Step {node.depth}, p = {probability(node.logP)}
        {node.parent.logP > node.logP && ` (${probability(node.logP - node.parent.logP)} after its parent)`},
        token {node.token}.
      </p>
      {view.shown.map((run) => (
        <p key={run.number}>
          <i class="dot" style={{ background: run.colour }} /> {why(store, view, run, node)}
        </p>
      ))}
      {canBranch && (
        <p>
          <button type="button" onClick={() => void store.branch(prefixOf(node))}>
            Expand from here
          </button>{" "}
          <small>draws {store.state.scene.k} sequences that begin so</small>
        </p>
      )}
      {next.length > 0 && (
        <table>
          <caption>What may follow</caption>
          <tbody>
            {next.map((child) => (
              <tr key={child.id} class={child.kept.size === 0 ? "dropped" : ""}>
                <td>{probability(child.logP - node.logP)}</td>
                <td class="text">
                  <button type="button" class="plain" onClick={() => store.set({ selected: keyOf(child) })}>
                    {child.label.text}
                  </button>
                </td>
                <td class="text">{child.kept.size > 0 ? "kept" : "dropped"}</td>
                <td>
                  {store.hasServer && !child.isEnd && (
                    <button
                      type="button"
                      class="small"
                      aria-label={`Force ${child.label.text} and branch`}
                      onClick={() => void store.branch(prefixOf(child))}
                    >
                      force
                    </button>
                  )}
                </td>
              </tr>
            ))}
            {[...node.logRest].slice(0, 1).map(([number, logRest]) => (
              <tr key={`rest ${number}`} class="dropped">
                <td>{probability(logRest - node.logP)}</td>
                <td class="text">all other tokens together</td>
                <td class="text">dropped</td>
                <td />
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </section>
  );
}

/** What one run did with a prefix, and why, in sentences. */
export function why(store: Store, view: View, run: Shown, node: TreeNode): string {
  const seen = node.kept.get(run.number);
  const lost = node.lost.get(run.number);
  const name = `${run.name}: `;
  const design = store.design(run.design);
  const { k } = view.document.scene;
  if (lost !== undefined) {
    const p = Math.exp(node.logP);
    const mass = `${percent(p)} of all probability was lost with it.`;
    const gumbel = run.design.startsWith("gumbel");
    const later =
      lost.step > node.depth
        ? `It was complete, stayed until step ${lost.step}, and was dropped there.`
        : "It was dropped.";
    if (lost.pi === 0)
      return `${name}${later} It was not among the ${k} best, and this design leaves nothing to chance. ${mass}`;
    if (lost.pi === null) return `${name}${later} This design does not tell how likely that was. ${mass}`;
    const chance = gumbel
      ? `Its perturbed score was below the threshold, which a prefix of its probability beats with q = ${number(lost.pi)}.`
      : design.distinct
        ? `It would have been kept with probability π = ${number(lost.pi)}, so this happens in ${percent(1 - lost.pi)} of such draws. ${reason(run.design)}`
        : `${number(lost.pi)} copies of it were expected.`;
    return `${name}${later} ${chance} ${mass} ${design.estimates ? "The sequences that stayed stand for it by their weights." : ""}`;
  }
  if (seen?.forced) return `${name}forced.`;
  if (seen !== undefined) {
    const fate =
      node.output !== null && run.weights.has(node.output)
        ? "It is in the final beam."
        : seen.until < run.last
          ? `Nothing that extends it was kept after step ${seen.until}.`
          : "It is the beginning of sequences in the final beam.";
    if (seen.pi === null) return `${name}kept. ${fate}`;
    if (!design.distinct)
      return `${name}drawn ${plural(seen.count, "time")}, where ${number(seen.pi)} were expected. ${fate}`;
    if (run.design.startsWith("gumbel")) {
      return `${name}kept: its perturbed score was above the threshold, which a prefix of its probability beats with q = ${number(seen.pi)}. ${fate}`;
    }
    if (seen.pi > 1 - 1e-9) return `${name}kept for certain at step ${node.depth} (π = 1). ${fate}`;
    return `${name}kept at step ${node.depth}, with probability π = ${number(seen.pi)} given the step before. ${fate}`;
  }
  if (node.parent !== null && !node.parent.kept.has(run.number))
    return `${name}never came this far: a shorter prefix was dropped.`;
  return `${name}it was not kept, and was not among the likeliest candidates that are listed.`;
}

function reason(design: string): string {
  if (design.startsWith("stratified")) return "It was light, and the equally spaced points fell on others.";
  if (design.startsWith("conditional-poisson") || design.startsWith("calibrated"))
    return "Its coin came up tails.";
  return "";
}
