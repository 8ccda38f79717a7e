import { render } from "preact";
import { App } from "./app";
import { Store } from "./store";
import type { Data } from "./types";
import "./style.css";

const data = JSON.parse(document.getElementById("data")!.textContent!) as Data;
const store = new Store(data);
render(<App store={store} />, document.getElementById("app")!);
void store.draw();
