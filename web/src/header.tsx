// The title, the model, what is going on, and what one can take away.
import { useRef, useState } from "preact/hooks";
import { asPython } from "./python";
import type { Store } from "./store";
import type { View } from "./view";

interface HeaderProps {
  store: Store;
  view: View | null;
  onTheme: () => void;
}

export function Header({ store, view, onTheme }: HeaderProps) {
  const file = useRef<HTMLInputElement>(null);
  const help = useRef<HTMLDialogElement>(null);
  const code = useRef<HTMLDialogElement>(null);
  const [python, setPython] = useState("");
  const { state, data } = store;

  function save(): void {
    const content = store.save();
    if (content === null) return;
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([content], { type: "application/json" }));
    link.download = "cpsbs-run.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  async function load(): Promise<void> {
    const chosen = file.current?.files?.[0];
    if (chosen === undefined) return;
    store.load(await chosen.text());
    file.current!.value = "";
  }

  async function copy(): Promise<void> {
    const design = store.design(state.chosen[0]!);
    const { scene, seed, model } = state;
    const load = model === data.model ? data.load : { name: model };
    const text = asPython({ load, prompt: store.document?.prompt ?? scene.text, scene, design, seed });
    setPython(text);
    code.current?.showModal();
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // The code can be copied by hand from the dialog.
    }
  }

  function switchTheme(): void {
    const root = document.documentElement;
    const dark =
      root.dataset["theme"] === undefined
        ? matchMedia("(prefers-color-scheme: dark)").matches
        : root.dataset["theme"] === "dark";
    root.dataset["theme"] = dark ? "light" : "dark";
    onTheme();
  }

  const { busy, message } = state;
  return (
    <header>
      <h1>cpsbs explore</h1>
      <span class="model">{state.model}</span>
      <span class="status" role="status">
        {busy !== null && (
          <>
            <progress
              {...(busy.progress === null ? {} : { value: busy.progress })}
              max={1}
              aria-label={busy.what}
            />{" "}
            {busy.what}{" "}
            <button type="button" class="small" onClick={() => store.stop()}>
              Stop
            </button>
          </>
        )}
        {busy === null && message !== null && (
          <span class={`message ${message.kind}`} role={message.kind === "error" ? "alert" : undefined}>
            {message.text}
          </span>
        )}
      </span>
      <nav aria-label="Tools">
        <button type="button" onClick={save} disabled={view === null}>
          Save
        </button>
        <button type="button" onClick={() => file.current?.click()}>
          Load
        </button>
        <input
          ref={file}
          type="file"
          accept=".json,application/json"
          class="unseen"
          tabIndex={-1}
          aria-label="Saved run"
          onChange={() => void load()}
        />
        <button type="button" onClick={() => void copy()}>
          Copy as Python
        </button>
        <button type="button" onClick={switchTheme} aria-label="Switch between light and dark">
          ◐
        </button>
        <button type="button" onClick={() => help.current?.showModal()} aria-label="Help">
          ?
        </button>
      </nav>
      <dialog ref={code} aria-label="Python">
        <p>This code draws the same sequences. It is in the clipboard, if the browser allows that.</p>
        <pre tabIndex={0}>{python}</pre>
        <form method="dialog">
          <button>Close</button>
        </form>
      </dialog>
      <dialog ref={help} aria-label="Help">
        <h2>What the picture says</h2>
        <p>
          A search reads the tree from left to right. At every step it offers all extensions of the prefixes
          that it holds, and the design picks K of them. An edge is as wide as the probability p that flows
          through it. A token is filled as far as its inclusion probability π goes, given the step before:
          full for certain picks. Small grey tokens were dropped. The bars on top say how much probability
          each step kept (coloured) and dropped (grey).
        </p>
        <p>
          A sequence that is kept with probability π stands for 1/π like it, so its weight in estimates is w =
          p/π. A filled dot before a sequence means that the design of that colour has it in its beam.
        </p>
        <h2>Keys on the tree</h2>
        <dl class="keys">
          <dt>← → ↑ ↓</dt>
          <dd>parent, first extension, neighbours in the column</dd>
          <dt>Home, Esc</dt>
          <dd>first token, no selection</dd>
          <dt>[ ]</dt>
          <dd>step before, next step</dd>
          <dt>+ − 0</dt>
          <dd>zoom in, zoom out, fit</dd>
        </dl>
        <p>cpsbs {data.cpsbs}</p>
        <form method="dialog">
          <button>Close</button>
        </form>
      </dialog>
    </header>
  );
}
