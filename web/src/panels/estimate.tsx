// The estimate of E f as it builds up, sequence by sequence, with its error and what is certain.
import { scaleLinear } from "d3-scale";
import { line, curveStepAfter } from "d3-shape";
import { FUNCTION_NAMES, number, percent, plural } from "../format";
import type { Store } from "../store";
import type { View } from "../view";
import type { Document, Run } from "../types";

const WIDTH = 340;
const HEIGHT = 220;
const LEFT = 46;
const BOTTOM = 30;
const ROW = 36;

export function EstimatePanel({ store, view }: { store: Store; view: View }) {
  const { document } = view;
  const runs = store.shownRuns().map((i) => document.runs[i]!);
  const f = FUNCTION_NAMES[document.scene.function];
  return (
    <>
      <p>
        Each sequence adds w·f to the estimate of E[{f}], largest contribution first. The bar at the end is
        the 95% interval.
      </p>
      <BuildUp store={store} document={document} runs={runs} />
      <p>
        Dots are estimates, bars their 95% intervals, and brackets bounds that are certain. Ticks below are
        the estimates of other seeds; the grey line is the exact value, where it is known.
      </p>
      <Intervals store={store} document={document} runs={runs} />
      <ul class="lines">
        {runs.map((run) => (
          <li key={run.design}>
            <i class="dot" style={{ background: store.colour(run.design) }} />{" "}
            <code>{run.estimate?.line}</code>
            {run.estimate?.warning && <p class="note">{run.estimate.warning}</p>}
          </li>
        ))}
      </ul>
      <Exactly store={store} document={document} />
    </>
  );
}

function Exactly({ store, document }: { store: Store; document: Document }) {
  const { exact } = document;
  if (exact === null) {
    if (!store.hasServer) return null;
    return (
      <p>
        <button type="button" onClick={() => void store.exact()}>
          Find the exact value
        </button>{" "}
        Draws until almost all probability is covered; where the distribution is flat, that is out of reach.
      </p>
    );
  }
  const { low, high } = exact;
  const found = `${plural(exact.sequences, "sequence")} with ${percent(exact.captured)} of the probability`;
  if (low === null && high === null) return <p>{found} do not bound E f.</p>;
  if (high === null)
    return (
      <p>
        E f is certainly at least <b>{number(low, 5)}</b>, by {found}.
      </p>
    );
  if (isExact(exact))
    return (
      <p>
        The exact value is <b>{number((low! + high) / 2, 4)}</b>, to within {number((high - low!) / 2, 1)}, by{" "}
        {found}.
      </p>
    );
  return (
    <p>
      E f is certainly between <b>{number(low, 5)}</b> and <b>{number(high, 5)}</b>, by {found}.
    </p>
  );
}

function isExact({ low, high }: { low: number | null; high: number | null }): boolean {
  return low !== null && high !== null && high - low <= 1e-3 * Math.max(Math.abs(low), Math.abs(high));
}

/** Partial sums of w f, the largest terms first. */
export function partialSums(document: Document, run: Run): number[] {
  const terms = run.y.flatMap((output, i) => {
    const w = run.w[i];
    const value = document.outputs[output]!.f;
    return w === null || w === undefined || value === null ? [] : [w * value];
  });
  terms.sort((a, b) => Math.abs(b) - Math.abs(a));
  let sum = 0;
  return [0, ...terms.map((term) => (sum += term))];
}

interface ChartProps {
  store: Store;
  document: Document;
  runs: Run[];
}

function BuildUp({ store, document, runs }: ChartProps) {
  const series = runs
    .map((run) => ({ run, sums: partialSums(document, run) }))
    .filter(({ sums }) => sums.length > 1);
  const values = series.flatMap(({ sums }) => sums);
  if (values.length === 0) return <p class="note">None of the chosen designs has weights.</p>;
  const y = scaleLinear([Math.min(0, ...values), Math.max(0, ...values)], [HEIGHT - BOTTOM, 10]).nice();
  const most = Math.max(1, ...series.map(({ sums }) => sums.length - 1));
  const x = scaleLinear([0, most], [LEFT, WIDTH - 12]);
  const path = line<number>()
    .x((_, i) => x(i))
    .y(y)
    .curve(curveStepAfter);
  return (
    <svg
      class="chart"
      viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
      role="img"
      aria-label={`Partial sums of w f: ${series.map(({ run, sums }) => `${run.design} ends at ${number(sums.at(-1))}`).join("; ")}`}
    >
      {y.ticks(5).map((tick) => (
        <g key={tick}>
          <line class="grid" x1={LEFT} x2={WIDTH - 8} y1={y(tick)} y2={y(tick)} />
          <text x={LEFT - 6} y={y(tick) + 4} text-anchor="end">
            {number(tick)}
          </text>
        </g>
      ))}
      <text x={(LEFT + WIDTH) / 2} y={HEIGHT - 4} text-anchor="middle">
        sequences
      </text>
      {x
        .ticks(Math.min(6, most))
        .filter(Number.isInteger)
        .map((tick) => (
          <text key={tick} x={x(tick)} y={HEIGHT - BOTTOM + 14} text-anchor="middle">
            {tick}
          </text>
        ))}
      {series.map(({ run }) => {
        const [low, high] = run.estimate?.interval_95 ?? [null, null];
        if (run.estimate?.standard_error == null || low === null || high === null) return null;
        return (
          <line
            key={`${run.design} interval`}
            x1={x(most)}
            x2={x(most)}
            y1={y(low)}
            y2={y(high)}
            stroke={store.colour(run.design)}
            stroke-width={4}
            stroke-opacity={0.6}
          />
        );
      })}
      {series.map(({ run, sums }) => (
        <path
          key={run.design}
          d={path(sums)!}
          stroke={store.colour(run.design)}
          fill="none"
          stroke-width={2}
        />
      ))}
    </svg>
  );
}

/** The estimates of all designs on one scale, with their intervals, bounds and other seeds. */
function Intervals({ store, document, runs }: ChartProps) {
  const { exact } = document;
  const others = runs.map((run) =>
    store.runsOf(run.design).flatMap((i) => {
      const value = document.runs[i]!.estimate?.value;
      return value == null ? [] : [value];
    }),
  );
  const values = runs.flatMap(({ estimate }) => [
    estimate?.value,
    ...(estimate?.interval_95 ?? []),
    ...(estimate?.bounds ?? []),
  ]);
  const finite = [...values, ...others.flat(), exact?.low, exact?.high].filter(
    (value): value is number => typeof value === "number" && Number.isFinite(value),
  );
  if (finite.length === 0) return null;
  const x = scaleLinear([Math.min(...finite), Math.max(...finite)], [14, WIDTH - 14]).nice(4);
  const height = ROW * runs.length + BOTTOM;
  const inside = (value: number | null | undefined): value is number => typeof value === "number";
  return (
    <svg
      class="chart"
      viewBox={`0 0 ${WIDTH} ${height}`}
      role="img"
      aria-label={runs.map((run) => run.estimate?.line ?? run.design).join("; ")}
    >
      {x.ticks(5).map((tick) => (
        <g key={tick}>
          <line class="grid" x1={x(tick)} x2={x(tick)} y1={0} y2={height - BOTTOM + 4} />
          <text x={x(tick)} y={height - BOTTOM + 16} text-anchor="middle">
            {number(tick)}
          </text>
        </g>
      ))}
      {exact !== null && inside(exact.low) && inside(exact.high) && (
        <rect
          class="exact"
          x={x(exact.low) - 0.75}
          width={Math.max(1.5, x(exact.high) - x(exact.low))}
          y={0}
          height={height - BOTTOM}
        />
      )}
      {runs.map(({ design, estimate }, i) => {
        const colour = store.colour(design);
        const at = ROW * i + 16;
        const [low, high] = estimate?.interval_95 ?? [null, null];
        const [least, largest] = estimate?.bounds ?? [null, null];
        return (
          <g key={design} stroke={colour} fill="none">
            {others[i]!.length > 1 &&
              others[i]!.map((value, j) => (
                <line key={j} x1={x(value)} x2={x(value)} y1={at + 9} y2={at + 16} stroke-opacity={0.5} />
              ))}
            {inside(estimate?.value) && inside(low) && inside(high) && (
              <line x1={x(low)} x2={x(high)} y1={at} y2={at} stroke-width={3} />
            )}
            {inside(estimate?.value) && <circle cx={x(estimate.value)} cy={at} r={4} fill={colour} />}
            {inside(least) && <path d={`M${x(least) + 4},${at - 7}H${x(least)}V${at + 7}h4`} />}
            {inside(largest) && <path d={`M${x(largest) - 4},${at - 7}H${x(largest)}V${at + 7}h-4`} />}
          </g>
        );
      })}
    </svg>
  );
}
