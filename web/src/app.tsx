// The page as a whole: controls, the tree, and the panels beside it.
import { Component, type ComponentChildren } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { TreeCanvas } from "./canvas";
import { Controls } from "./controls";
import { Header } from "./header";
import { describe, move } from "./keyboard";
import { Designs } from "./panels/designs";
import { EstimatePanel } from "./panels/estimate";
import { Inspector } from "./panels/inspector";
import { Redraws } from "./panels/redraws";
import { Sequences } from "./panels/sequences";
import { StepPanel } from "./panels/step";
import type { Store, Tab } from "./store";
import { keyOf } from "./tree";
import { Viewer, type View } from "./view";

const TABS: [Tab, string][] = [
  ["sequences", "Sequences"],
  ["step", "Step"],
  ["redraws", "Redraws"],
  ["estimate", "Estimate"],
  ["designs", "Designs"],
];

export function App({ store }: { store: Store }) {
  const [, refresh] = useState(0);
  useEffect(() => store.subscribe(() => refresh((count) => count + 1)), [store]);
  const canvas = useRef<HTMLCanvasElement>(null);
  const tree = useRef<TreeCanvas | null>(null);
  const viewer = useMemo(() => new Viewer(), []);
  const { state } = store;

  useEffect(() => {
    tree.current = new TreeCanvas(canvas.current!, {
      select: (node) => store.set({ selected: node === null ? null : keyOf(node) }),
      step: (step) => store.set({ step, tab: "step" }),
    });
    refresh((count) => count + 1);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    const changed = () => tree.current?.readTheme();
    scheme.addEventListener("change", changed);
    return () => scheme.removeEventListener("change", changed);
  }, [store]);

  const { view, failure } = tryView(viewer, store, tree.current);
  useEffect(() => {
    tree.current?.show(view?.picture ?? null);
  }, [view?.picture]);
  useEffect(() => {
    if (view?.selected) tree.current?.reveal(view.selected);
  }, [state.selected]);

  function press(event: KeyboardEvent): void {
    if (view === null || event.ctrlKey || event.metaKey || event.altKey) return;
    const zooms: Record<string, () => void> = {
      "+": () => tree.current?.zoomBy(1.25),
      "-": () => tree.current?.zoomBy(0.8),
      "0": () => tree.current?.fit(),
      "[": () => store.set({ step: Math.max(1, view.step - 1) }),
      "]": () => store.set({ step: view.step + 1 >= view.tree.steps ? null : view.step + 1 }),
      Escape: () => store.set({ selected: null }),
    };
    const node = move(view, event.key);
    if (node !== null) store.set({ selected: keyOf(node) });
    else if (zooms[event.key] !== undefined) zooms[event.key]!();
    else return;
    event.preventDefault();
  }

  const steps = view?.tree.steps ?? 1;
  return (
    <>
      <Header store={store} view={view} onTheme={() => tree.current?.readTheme()} />
      <main>
        <Controls store={store} />
        <section class="tree" aria-label="Tree of tokens">
          <div class="bar">
            <div class="slider">
              <label for="step">Step</label>
              <input
                id="step"
                type="range"
                min={1}
                max={steps}
                value={state.step ?? steps}
                aria-valuetext={state.step === null ? "end" : `step ${state.step}`}
                onInput={(event) => {
                  const step = Number(event.currentTarget.value);
                  store.set({
                    step: step >= steps ? null : step,
                    ...(step < steps ? { tab: "step" as Tab } : {}),
                  });
                }}
              />
              <output for="step">{state.step === null ? "end" : `${state.step} of ${steps}`}</output>
            </div>
            <div class="slider">
              <label for="lost">Dropped</label>
              <input
                id="lost"
                type="range"
                min={0}
                max={400}
                step={10}
                value={state.lost}
                title="How many dropped candidates to show, the likeliest first"
                onInput={(event) => store.set({ lost: Number(event.currentTarget.value) })}
              />
              <output for="lost">{state.lost}</output>
            </div>
            <span class="buttons">
              <button type="button" aria-label="Zoom in" onClick={() => tree.current?.zoomBy(1.25)}>
                +
              </button>
              <button type="button" aria-label="Zoom out" onClick={() => tree.current?.zoomBy(0.8)}>
                −
              </button>
              <button type="button" onClick={() => tree.current?.fit()}>
                Fit
              </button>
            </span>
          </div>
          <canvas
            ref={canvas}
            tabIndex={0}
            role="application"
            aria-roledescription="tree of tokens"
            aria-label="Tree of tokens. Arrow keys move along it, plus and minus zoom, square brackets change the step."
            onKeyDown={press}
          />
          <p class="unseen" role="status" aria-live="polite" id="spoken">
            {view === null ? "" : describe(view)}
          </p>
          <Branches store={store} view={view} />
        </section>
        <aside aria-label="Details">
          {failure !== null && (
            <p class="message error" role="alert">
              {failure}
            </p>
          )}
          {view === null ? (
            <p class="hint">{state.busy === null ? nothingYet(store) : "Drawing …"}</p>
          ) : (
            <>
              <Inspector store={store} view={view} />
              <Tabs store={store} />
              <div role="tabpanel" id="panel" tabIndex={0} aria-labelledby={`tab-${state.tab}`} class="panel">
                <Guarded key={state.tab}>
                  {state.tab === "sequences" && <Sequences store={store} view={view} />}
                  {state.tab === "step" && <StepPanel store={store} view={view} />}
                  {state.tab === "redraws" && <Redraws store={store} view={view} />}
                  {state.tab === "estimate" && <EstimatePanel store={store} view={view} />}
                  {state.tab === "designs" && <Designs store={store} view={view} />}
                </Guarded>
              </div>
            </>
          )}
        </aside>
      </main>
    </>
  );
}

function nothingYet(store: Store): string {
  const { scene } = store.state;
  if (scene.text.trim() === "") return "Type a text to draw from.";
  if (scene.function === "contains" && scene.argument.trim() === "") return "Type a phrase.";
  if (["bleu", "chrf"].includes(scene.function) && scene.argument.trim() === "") return "Type a reference.";
  return "Nothing is drawn yet.";
}

/** Shows what went wrong in a panel, in the place of the panel. */
class Guarded extends Component<{ children: ComponentChildren }, { failure: string | null }> {
  override state = { failure: null };

  override componentDidCatch(error: Error): void {
    this.setState({ failure: error.message });
  }

  render() {
    if (this.state.failure === null) return this.props.children;
    return <p class="message error">This cannot be shown: {this.state.failure}</p>;
  }
}

/** A damaged file must not blank the page. */
function tryView(
  viewer: Viewer,
  store: Store,
  tree: TreeCanvas | null,
): { view: View | null; failure: string | null } {
  if (tree === null) return { view: null, failure: null };
  try {
    return { view: viewer.view(store, tree.measure), failure: null };
  } catch (error) {
    return { view: null, failure: `This run cannot be shown: ${(error as Error).message}` };
  }
}

function Branches({ store, view }: { store: Store; view: View | null }) {
  const branches = store.branches();
  if (view === null || branches.length === 0) return null;
  return (
    <ul class="branches" aria-label="Branches">
      {view.shown
        .filter((run) => run.after > 0)
        .map(({ number, name }) => (
          <li key={number}>
            {name}, seed {view.document.runs[number]!.seed}{" "}
            <button
              type="button"
              class="small"
              aria-label={`Remove the branch ${name}`}
              onClick={() => store.removeBranch(number)}
            >
              ×
            </button>
          </li>
        ))}
    </ul>
  );
}

function Tabs({ store }: { store: Store }) {
  const at = TABS.findIndex(([tab]) => tab === store.state.tab);
  function press(event: KeyboardEvent): void {
    const to = event.key === "ArrowRight" ? at + 1 : event.key === "ArrowLeft" ? at - 1 : null;
    if (to === null) return;
    const [tab] = TABS[(to + TABS.length) % TABS.length]!;
    store.set({ tab });
    document.getElementById(`tab-${tab}`)?.focus();
  }
  return (
    <div role="tablist" aria-label="Panels" class="tabs" onKeyDown={press}>
      {TABS.map(([tab, title], i) => (
        <button
          key={tab}
          type="button"
          role="tab"
          id={`tab-${tab}`}
          aria-controls="panel"
          aria-selected={i === at}
          tabIndex={i === at ? 0 : -1}
          onClick={() => store.set({ tab })}
        >
          {title}
        </button>
      ))}
    </div>
  );
}
