// One step: what was offered, with what probability, what was picked, and which parents died.
import { number, percent, plural, probability } from "../format";
import type { Store } from "../store";
import { keyOf, textOf, type TreeNode } from "../tree";
import type { Shown } from "../canvas";
import type { View } from "../view";

const MOST_ROWS = 60;

export function StepPanel({ store, view }: { store: Store; view: View }) {
  return (
    <>
      {view.shown.map((run) => (
        <OneStep key={run.number} store={store} view={view} run={run} />
      ))}
    </>
  );
}

function OneStep({ store, view, run }: { store: Store; view: View; run: Shown }) {
  const { step, tree } = view;
  const beams = tree.beams.get(run.number);
  const at = step - run.after;
  const mass = run.masses[at - 1];
  const before = beams?.[at - 1];
  const after = beams?.[at];
  if (mass === undefined || before === undefined || after === undefined) {
    return (
      <section>
        <h2>
          <i class="dot" style={{ background: run.colour }} /> {run.name}
        </h2>
        <p>
          {run.masses.length === 0
            ? "The steps of this seed are not in the file."
            : `This run had ended before step ${step}.`}
        </p>
      </section>
    );
  }
  const picked = new Set(after);
  const lost = tree.nodes.filter((node) => node.lost.get(run.number)?.step === step);
  const died = before.filter((node) => (node.kept.get(run.number)?.until ?? 0) < step);
  const rows = [...after, ...lost.filter((node) => !picked.has(node))]
    .sort((a, b) => b.logP - a.logP)
    .slice(0, MOST_ROWS);
  const dropped = mass.dropped / (mass.kept + mass.dropped);
  return (
    <section>
      <h2>
        <i class="dot" style={{ background: run.colour }} /> {run.name}, step {step}
      </h2>
      <p>
        {plural(before.length, "parent")} offered their extensions; {plural(after.length, "one was", "were")}{" "}
        kept. They carry {percent(mass.kept)} of all probability; {percent(mass.dropped)} was dropped here (
        {percent(dropped)} of what there was).
        {died.length > 0 && ` ${plural(died.length, "parent")} died, with no extension kept: `}
        {died.slice(0, 8).map((node, i) => (
          <>
            {i > 0 && ", "}
            <NodeLink store={store} node={node}>
              “{textOf(node)}”
            </NodeLink>
          </>
        ))}
        {died.length > 8 && ", …"}
      </p>
      <table class="candidates">
        <caption>Candidates by probability, and what became of them</caption>
        <thead>
          <tr>
            <th scope="col">p</th>
            <th
              scope="col"
              title="inclusion probability at this step; for stochastic beam search, the probability to beat the threshold"
            >
              π
            </th>
            <th scope="col" class="name">
              outcome
            </th>
            <th scope="col" class="text">
              candidate
            </th>
          </tr>
        </thead>
        <tbody>
          {rows.map((node) => {
            const isPicked = picked.has(node);
            const pi = piAt(node, run.number, step, isPicked);
            return (
              <tr key={node.id} class={isPicked ? "" : "dropped"}>
                <td>{probability(node.logP)}</td>
                <td>{number(pi)}</td>
                <td class="name">{outcome(run.design, pi, isPicked, node, run.number)}</td>
                <td class="text">
                  <NodeLink store={store} node={node}>
                    {node.depth < step ? (
                      `${textOf(node)} (ended)`
                    ) : (
                      <>
                        …{node.parent && [...textOf(node.parent)].slice(-24).join("")}{" "}
                        <b>{node.label.text}</b>
                      </>
                    )}
                  </NodeLink>
                </td>
              </tr>
            );
          })}
        </tbody>
      </table>
      {after.length + lost.length > MOST_ROWS && <p>The likeliest {MOST_ROWS} are listed.</p>}
    </section>
  );
}

function NodeLink({
  store,
  node,
  children,
}: {
  store: Store;
  node: TreeNode;
  children: preact.ComponentChildren;
}) {
  return (
    <button type="button" class="plain" onClick={() => store.set({ selected: keyOf(node) })}>
      {children}
    </button>
  );
}

/** The inclusion probability of a candidate at a step; a sequence that had ended is kept by itself. */
function piAt(node: TreeNode, run: number, step: number, picked: boolean): number | null {
  const lost = node.lost.get(run);
  if (!picked && lost !== undefined) return lost.pi;
  const seen = node.kept.get(run);
  return (node.depth < step ? seen?.later?.get(step) : seen?.pi) ?? null;
}

/** How the design decided, in its own words. */
export function outcome(
  design: string,
  pi: number | null,
  picked: boolean,
  node: TreeNode,
  run: number,
): string {
  const certain = pi !== null && pi > 1 - 1e-9;
  if (design.startsWith("stratified")) {
    if (certain) return "heavy: certain";
    return picked ? (pi === null ? "kept" : "light: picked") : "light: not picked";
  }
  if (design.startsWith("conditional-poisson") || design.startsWith("calibrated")) {
    if (certain) return "certain";
    return picked ? (pi === null ? "kept" : "coin: heads") : "coin: tails";
  }
  if (design.startsWith("gumbel")) return picked ? "above the threshold" : "below the threshold";
  if (design.startsWith("independent") || design.startsWith("arithmetic")) {
    const count = node.kept.get(run)?.count ?? 0;
    return picked ? `drawn ${count}×` : "not drawn";
  }
  return picked ? "kept" : "dropped";
}
