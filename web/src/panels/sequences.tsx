// The finished sequences, as a table.
import { FUNCTION_NAMES, number, probability } from "../format";
import type { Store } from "../store";
import { keyOf } from "../tree";
import type { View } from "../view";

export function Sequences({ store, view }: { store: Store; view: View }) {
  const { document, shown, tree } = view;
  const outputs = [...tree.leaves.keys()].sort(
    (a, b) => document.outputs[b]!.log_p - document.outputs[a]!.log_p,
  );
  return (
    <>
      <table class="sequences">
        <caption>
          <span class="legend">
            Every sequence with its probability p
            {shown.map((run) => (
              <span key={run.number}>
                {" "}
                <i class="dot" style={{ background: run.colour }} /> {run.name}
              </span>
            ))}
          </span>
        </caption>
        <thead>
          <tr>
            <th scope="col">p</th>
            {shown.map((run) => (
              <>
                <th scope="col" style={{ color: run.colour }} title={`inclusion probability by ${run.name}`}>
                  π
                </th>
                <th scope="col" style={{ color: run.colour }} title={`weight in estimates from ${run.name}`}>
                  w
                </th>
              </>
            ))}
            <th scope="col">{FUNCTION_NAMES[document.scene.function]}</th>
            <th scope="col" class="text">
              sequence
            </th>
          </tr>
        </thead>
        <tbody>
          {outputs.map((i) => {
            const output = document.outputs[i]!;
            const node = tree.leaves.get(i)!;
            const selected = view.selected === node;
            return (
              <tr key={i} class={selected ? "selected" : ""}>
                <td>{probability(output.log_p)}</td>
                {shown.map((run) => {
                  const own = run.weights.get(i);
                  return (
                    <>
                      <td>{own === undefined ? "" : number(own.pi)}</td>
                      <td>{own === undefined ? "" : number(own.w)}</td>
                    </>
                  );
                })}
                <td>{number(output.f)}</td>
                <td class="text">
                  <button
                    type="button"
                    class="plain"
                    aria-pressed={selected}
                    onClick={() => store.set({ selected: keyOf(node) })}
                  >
                    {output.text === "" ? "(empty)" : output.text}
                    {output.finished ? "" : " …"}
                  </button>
                </td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </>
  );
}
