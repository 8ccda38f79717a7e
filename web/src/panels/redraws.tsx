// Many seeds: how often each sequence came, and how often its π says that it should.
import { scaleLinear } from "d3-scale";
import { number, plural } from "../format";
import type { Store } from "../store";
import { keyOf } from "../tree";
import { frequencies, type Frequency, type View } from "../view";

const SIZE = 260;
const EDGE = 34;
const MOST_ROWS = 40;

export function Redraws({ store, view }: { store: Store; view: View }) {
  const { document } = view;
  return (
    <>
      {store.state.chosen.map((design) => {
        const runs = store.runsOf(design).map((i) => document.runs[i]!);
        if (runs.length < 2) {
          return (
            <section key={design}>
              <h2>
                <i class="dot" style={{ background: store.colour(design) }} /> {design}
              </h2>
              <p>
                {store.hasServer
                  ? "Press “Redraw” to draw with many seeds, and see how often each sequence comes."
                  : "The file holds a single run of this design."}
              </p>
            </section>
          );
        }
        const found = frequencies(runs);
        const repeats = !store.design(design).distinct;
        return (
          <section key={design}>
            <h2>
              <i class="dot" style={{ background: store.colour(design) }} /> {design}:{" "}
              {plural(runs.length, "run")}, {plural(found.length, "different sequence")}
            </h2>
            <Scatter found={found} runs={runs.length} colour={store.colour(design)} repeats={repeats} />
            <p class="note">
              Sequences that came in fewer than five runs are pale. Those that came in none cannot be shown,
              so the rare ones that did lie above the diagonal.
            </p>
            <table>
              <caption>
                {repeats
                  ? "Copies in a run, observed and expected (K p)"
                  : "Share of the runs that drew a sequence, beside its π (harmonic mean over these runs)"}
              </caption>
              <thead>
                <tr>
                  <th scope="col">{repeats ? "copies" : "share"}</th>
                  <th scope="col">{repeats ? "expected" : "π"}</th>
                  <th scope="col">p</th>
                  <th scope="col" class="text">
                    sequence
                  </th>
                </tr>
              </thead>
              <tbody>
                {found.slice(0, MOST_ROWS).map((row) => {
                  const output = document.outputs[row.output]!;
                  const node = view.tree.leaves.get(row.output);
                  return (
                    <tr key={row.output}>
                      <td>{number(row.observed)}</td>
                      <td>{number(row.expected)}</td>
                      <td>{number(Math.exp(output.log_p))}</td>
                      <td class="text">
                        <button
                          type="button"
                          class="plain"
                          disabled={node === undefined}
                          onClick={() => node && store.set({ selected: keyOf(node) })}
                        >
                          {output.text || "(empty)"}
                        </button>
                      </td>
                    </tr>
                  );
                })}
              </tbody>
            </table>
          </section>
        );
      })}
    </>
  );
}

interface ScatterProps {
  found: Frequency[];
  runs: number;
  colour: string;
  repeats: boolean;
}

function Scatter({ found, runs, colour, repeats }: ScatterProps) {
  const known = found.filter((row) => row.expected !== null);
  if (known.length === 0) return <p>This design does not know its inclusion probabilities.</p>;
  const most = Math.max(1, ...known.map((row) => Math.max(row.expected!, row.observed)));
  const scale = scaleLinear([0, most], [EDGE, SIZE]);
  const y = (value: number) => SIZE + EDGE - scale(value);
  // Two standard deviations of a share of independent runs with that probability.
  const band = Array.from({ length: 41 }, (_, i) => {
    const p = (i / 40) * most;
    return { p, wide: repeats ? 0 : 2 * Math.sqrt((Math.min(p, 1) * (1 - Math.min(p, 1))) / runs) };
  });
  const edge = (sign: number) =>
    band.map(({ p, wide }) => `${scale(p)},${y(Math.max(0, Math.min(most, p + sign * wide)))}`);
  return (
    <svg
      class="chart"
      viewBox={`0 0 ${SIZE + 12} ${SIZE + EDGE + 8}`}
      role="img"
      aria-label={`Observed share of ${known.length} sequences against their inclusion probability; they lie along the diagonal if π is right`}
    >
      {!repeats && <polygon class="band" points={[...edge(1), ...edge(-1).reverse()].join(" ")} />}
      <line class="axis" x1={scale(0)} y1={y(0)} x2={scale(most)} y2={y(most)} />
      <line class="axis" x1={scale(0)} y1={y(0)} x2={scale(most)} y2={y(0)} />
      <line class="axis" x1={scale(0)} y1={y(0)} x2={scale(0)} y2={y(most)} />
      {scale.ticks(4).map((tick) => (
        <g key={tick}>
          <text x={scale(tick)} y={y(0) + 14} text-anchor="middle">
            {tick}
          </text>
          <text x={scale(0) - 5} y={y(tick) + 4} text-anchor="end">
            {tick}
          </text>
        </g>
      ))}
      <text x={scale(most / 2)} y={y(0) + 28} text-anchor="middle">
        {repeats ? "expected copies" : "π"}
      </text>
      <text x={11} y={y(most / 2)} transform={`rotate(-90 11 ${y(most / 2)})`} text-anchor="middle">
        observed
      </text>
      {known.map((row) => (
        <circle
          key={row.output}
          cx={scale(row.expected!)}
          cy={y(row.observed)}
          r={3.5}
          fill={colour}
          fill-opacity={row.runs < 5 ? 0.15 : 0.65}
        />
      ))}
    </svg>
  );
}
