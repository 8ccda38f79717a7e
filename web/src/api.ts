// Asks the server of the page, whose answers are lines of JSON.
import type { Document } from "./types";

interface Line {
  progress?: number;
  document?: Document;
  error?: string;
  cancelled?: boolean;
}

export interface Listener {
  progress(length: number): void;
  document(document: Document): void;
}

export class Stopped extends Error {}

export async function ask(
  what: "draw" | "redraw" | "exact",
  body: unknown,
  listener: Listener,
  signal: AbortSignal,
): Promise<void> {
  const address = `api/${what}${location.search}`;
  let response: Response;
  try {
    response = await fetch(address, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (signal.aborted) throw new Stopped("Stopped.");
    throw new Error(
      `The server does not answer: ${(error as Error).message}. Is cpsbs explore still running?`,
    );
  }
  if (!response.ok || response.body === null) {
    const answer = (await response.json().catch(() => ({}))) as { error?: string };
    throw new Error(answer.error ?? `The server answered with status ${response.status}.`);
  }
  try {
    for await (const line of lines(response.body)) {
      if (line.error !== undefined) throw new Error(line.error);
      if (line.cancelled) throw new Stopped("Stopped, because another search was started.");
      if (line.progress !== undefined) listener.progress(line.progress);
      if (line.document !== undefined) listener.document(line.document);
    }
  } catch (error) {
    if (signal.aborted) throw new Stopped("Stopped.");
    throw error;
  }
}

async function* lines(body: ReadableStream<Uint8Array>): AsyncGenerator<Line> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    rest += decoder.decode(value, { stream: !done });
    const whole = rest.split("\n");
    rest = whole.pop()!;
    for (const line of whole) yield JSON.parse(line) as Line;
    if (done) return;
  }
}
