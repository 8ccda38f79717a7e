// The chosen designs side by side.
import { FUNCTION_NAMES, number, percent } from "../format";
import type { Store } from "../store";
import type { View } from "../view";
import type { Run } from "../types";

export function Designs({ store, view }: { store: Store; view: View }) {
  const { document } = view;
  const runs = store.shownRuns().map((i) => document.runs[i]!);
  const f = FUNCTION_NAMES[document.scene.function];
  const several = runs.some((run) => store.runsOf(run.design).length > 1);
  return (
    <>
      <table>
        <caption>
          One beam of {document.scene.k} by each design
          {several && ", and how much the estimates vary over seeds"}
        </caption>
        <thead>
          <tr>
            <th scope="col" class="name">
              design
            </th>
            <th scope="col">distinct</th>
            <th scope="col" title="the probability of all sequences in the beam together">
              Σp
            </th>
            <th scope="col" title="effective sample size of the weights">
              ESS
            </th>
            <th scope="col">E[{f}]</th>
            <th scope="col" title="standard error that the beam itself tells">
              ±
            </th>
            {several && (
              <th scope="col" title="standard deviation of the estimate over the seeds">
                SD over seeds
              </th>
            )}
          </tr>
        </thead>
        <tbody>
          {runs.map((run) => {
            const { estimate } = run;
            const all = store.runsOf(run.design).map((i) => document.runs[i]!);
            return (
              <tr key={run.design}>
                <td class="name">
                  <i class="dot" style={{ background: store.colour(run.design) }} /> {run.design}
                </td>
                <td>{estimate?.distinct ?? "–"}</td>
                <td>{estimate === null ? "–" : percent(estimate.captured)}</td>
                <td>{run.estimates ? number(estimate?.effective_size) : "–"}</td>
                <td>{number(estimate?.value, 4)}</td>
                <td>{estimate?.exact ? "exact" : number(estimate?.standard_error, 2)}</td>
                {several && <td>{number(spread(all), 2)}</td>}
              </tr>
            );
          })}
        </tbody>
      </table>
      <dl>
        {runs.map((run) => (
          <>
            <dt>
              <i class="dot" style={{ background: store.colour(run.design) }} /> {run.design}
            </dt>
            <dd>{store.design(run.design).summary}</dd>
          </>
        ))}
      </dl>
    </>
  );
}

/** The standard deviation of the estimates of several runs, or null if there are too few. */
export function spread(runs: Run[]): number | null {
  const values = runs.flatMap((run) => (run.estimate?.value == null ? [] : [run.estimate.value]));
  if (values.length < 3) return null;
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  const squares = values.reduce((sum, value) => sum + (value - mean) ** 2, 0);
  return Math.sqrt(squares / (values.length - 1));
}
