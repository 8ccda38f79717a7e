// How nodes are labelled. A token may be a part of a character: its bytes wait, as `pending`, until
// a later token completes the character, and are shown together with it.
import type { Piece } from "./types";

export interface Label {
  /** What to show; for a part of a character, its bytes in hexadecimal. */
  text: string;
  /** What the token adds to the text, with what was pending before; "" for a part of a character. */
  plain: string;
  /** Whether the token ends within a character and completes none. */
  partial: boolean;
  /** Bytes of a character that later tokens complete. */
  pending: number[];
}

const VISIBLE: Record<string, string> = { "\n": "↵", "\r": "␍", "\t": "⇥" };

export function labelOf(piece: Piece | undefined, pending: number[], isEnd: boolean): Label {
  if (isEnd) return { text: "end", plain: "", partial: false, pending: [] };
  if (piece === undefined) return { text: "?", plain: "?", partial: false, pending: [] };
  if (typeof piece === "string" && pending.length === 0) {
    return { text: visible(piece), plain: piece, partial: false, pending: [] };
  }
  const own = typeof piece === "string" ? [...new TextEncoder().encode(piece)] : piece;
  const bytes = [...pending, ...own];
  const left = unfinished(bytes);
  const whole = bytes.slice(0, bytes.length - left);
  if (whole.length === 0) {
    return { text: hexadecimal(own), plain: "", partial: true, pending: bytes };
  }
  const plain = new TextDecoder("utf-8", { ignoreBOM: true }).decode(new Uint8Array(whole));
  return { text: visible(plain), plain, partial: false, pending: bytes.slice(whole.length) };
}

/** The number of bytes at the end that begin a character and do not complete it. */
export function unfinished(bytes: number[]): number {
  for (let back = 1; back <= Math.min(3, bytes.length); back++) {
    const byte = bytes[bytes.length - back]!;
    if ((byte & 0xc0) === 0x80) continue; // it continues a character
    const length = byte >= 0xf8 ? 1 : byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc0 ? 2 : 1;
    return length > back ? back : 0;
  }
  return 0;
}

/** A text whose spaces at its beginning, line ends and tabs can be seen. */
export function visible(text: string): string {
  if (text === "") return "∅";
  return onOneLine(text.replace(/^ +/, (spaces) => "·".repeat(spaces.length)));
}

/** A text whose line ends and tabs can be seen, for places that have room for one line. */
export function onOneLine(text: string): string {
  return text.replace(/[\n\r\t]/g, (c) => VISIBLE[c]!);
}

export function hexadecimal(bytes: number[]): string {
  return bytes.map((byte) => byte.toString(16).toUpperCase().padStart(2, "0")).join(" ");
}
