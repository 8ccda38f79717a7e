// What is drawn: the text, the designs, K, the temperature, the seed and f.
import { useRef, useState } from "preact/hooks";
import { keyOf, type Store } from "./store";
import type { Scene } from "./types";

const WAIT = 350;

const FUNCTIONS: [string, string][] = [
  ["entropy", "entropy, −log p(y)"],
  ["length", "length in tokens"],
  ["bleu", "BLEU against a reference"],
  ["chrf", "chrF against a reference"],
  ["contains", "contains a phrase"],
];

export function Controls({ store }: { store: Store }) {
  const { state, data } = store;
  const { scene } = state;
  const fixed = !store.hasServer;
  const timer = useRef(0);
  const [count, setCount] = useState(100);

  /** Draws when the hand has come to rest. */
  function drawSoon(): void {
    clearTimeout(timer.current);
    timer.current = window.setTimeout(() => void store.draw(), WAIT);
  }

  function change(part: Partial<Scene>): void {
    clearTimeout(timer.current); // it would draw what is not complete any more
    store.changeScene(part);
    const next = { ...scene, ...part };
    const needed = next.function === "entropy" || next.function === "length" || next.argument.trim() !== "";
    if (needed && next.text.trim() !== "") drawSoon();
  }

  const seeds = store.seeds();
  const here = keyOf(state.model, scene);
  return (
    <form
      class="controls"
      aria-label="Settings"
      onSubmit={(event) => {
        event.preventDefault();
        void store.draw();
      }}
    >
      {store.examples.length > 1 && (
        <label>
          Example
          <select
            value={String(store.examples.findIndex((one) => keyOf(one.model, one.scene) === here))}
            onChange={(event) => {
              const chosen = store.examples[Number(event.currentTarget.value)];
              if (chosen === undefined) return;
              store.set({ scene: chosen.scene, model: chosen.model, selected: null, step: null });
              drawSoon();
            }}
          >
            <option value="-1" hidden>
              your own
            </option>
            {store.examples.map((one, i) => (
              <option key={i} value={String(i)}>
                {one.scene.text}
              </option>
            ))}
          </select>
        </label>
      )}
      <label>
        Text
        <textarea
          id="text"
          rows={2}
          value={scene.text}
          readOnly={fixed}
          onInput={(event) => change({ text: event.currentTarget.value })}
        />
      </label>
      <fieldset>
        <legend>Designs</legend>
        {data.designs.map(({ name, summary }) => (
          <label key={name} class="check" title={summary}>
            <input
              type="checkbox"
              name="design"
              value={name}
              checked={state.chosen.includes(name)}
              disabled={fixed && store.runsOf(name).length === 0}
              onChange={(event) => {
                const chosen = event.currentTarget.checked
                  ? [...state.chosen, name]
                  : state.chosen.filter((other) => other !== name);
                if (chosen.length === 0) event.currentTarget.checked = true;
                else {
                  store.set({ chosen });
                  drawSoon();
                }
              }}
            />
            <i class="dot" style={{ background: store.colour(name) }} />
            {name}
          </label>
        ))}
      </fieldset>
      <div class="pair">
        <label>
          K
          <input
            id="k"
            type="number"
            min={1}
            max={200}
            value={scene.k}
            readOnly={fixed}
            onInput={(event) => {
              const k = Number(event.currentTarget.value);
              if (event.currentTarget.reportValidity() && k >= 1) change({ k });
            }}
          />
        </label>
        <label>
          Temperature
          <input
            id="temperature"
            type="number"
            min={0.05}
            max={5}
            step="any"
            value={scene.temperature}
            readOnly={fixed}
            onInput={(event) => {
              const temperature = Number(event.currentTarget.value);
              if (event.currentTarget.reportValidity() && temperature > 0) change({ temperature });
            }}
          />
        </label>
      </div>
      {!fixed && (
        <input
          type="range"
          aria-label="Temperature"
          min={0.05}
          max={2}
          step={0.05}
          value={scene.temperature}
          onInput={(event) => change({ temperature: Number(event.currentTarget.value) })}
        />
      )}
      <label>
        Seed <output for="seed">{state.seed}</output>
        <input
          id="seed"
          type="range"
          min={fixed ? 0 : data.seed}
          max={fixed ? Math.max(0, seeds.length - 1) : data.seed + 99}
          value={fixed ? seeds.indexOf(state.seed) : state.seed}
          onInput={(event) => {
            const at = Number(event.currentTarget.value);
            store.set({ seed: fixed ? (seeds[at] ?? data.seed) : at, overlay: false });
            drawSoon();
          }}
        />
      </label>
      <div class="pair">
        <button
          type="button"
          id="redraw"
          disabled={fixed && seeds.length < 2}
          onClick={() => void store.redraw(count)}
        >
          {fixed ? `Show ${seeds.length} seeds` : "Redraw"}
        </button>
        {!fixed && (
          <label class="inline">
            <input
              type="number"
              aria-label="Number of seeds"
              min={2}
              max={1000}
              value={count}
              onInput={(event) =>
                setCount(Math.min(1000, Math.max(2, Number(event.currentTarget.value) || 2)))
              }
            />{" "}
            seeds
          </label>
        )}
        <label class="check">
          <input
            type="checkbox"
            id="overlay"
            checked={state.overlay}
            onChange={(event) => store.set({ overlay: event.currentTarget.checked })}
          />{" "}
          overlay
        </label>
      </div>
      <label>
        f
        <select
          id="function"
          value={scene.function}
          disabled={fixed}
          onChange={(event) => change({ function: event.currentTarget.value })}
        >
          {FUNCTIONS.map(([name, title]) => (
            <option key={name} value={name}>
              {title}
            </option>
          ))}
        </select>
      </label>
      {scene.function !== "entropy" && scene.function !== "length" && (
        <label>
          {scene.function === "contains" ? "Phrase" : "Reference"}
          <input
            id="argument"
            type="text"
            value={scene.argument}
            readOnly={fixed}
            onInput={(event) => change({ argument: event.currentTarget.value })}
          />
        </label>
      )}
      {fixed && (
        <p class="hint">
          {data.mode === "file"
            ? "This page is a file. To change the text, K or the temperature, run "
            : "This run is of another model. To draw with that one, run "}
          <code>cpsbs explore</code>
        </p>
      )}
    </form>
  );
}
