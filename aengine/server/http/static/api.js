/* The server: requests with the token of its user, streams of events, and which models there are. */

import { $, make } from "./dom.js";

export class Refused extends Error {
  constructor(status, error) {
    super(error.message);
    this.status = status;
    this.violations = error.violations ?? (error.param ? [{ field: error.param, message: error.message }] : []);
  }
}
export class ConnectionLost extends Error {}

let tokenAsked = null;
/** Whether there is a new token of the server to try. It is kept until the tab is closed, and nowhere else. */
function askForToken() {
  tokenAsked ??= new Promise((resolve) => {
    const dialog = $("token-dialog");
    $("token-refused").hidden = !sessionStorage.getItem("token");
    $("token").value = "";
    dialog.returnValue = "";
    dialog.onclose = () => {
      tokenAsked = null;
      if (dialog.returnValue === "use") sessionStorage.setItem("token", $("token").value.trim());
      $("token").value = "";
      resolve(dialog.returnValue === "use");
    };
    dialog.showModal();
  });
  return tokenAsked;
}

/** A response of the server. The path is relative, for servers behind a prefix. Throws `Refused`, `ConnectionLost`, or an AbortError. */
export async function call(path, { body, signal, ask = true } = {}) {
  for (;;) {
    const token = sessionStorage.getItem("token");
    const headers = { ...(token && { Authorization: `Bearer ${token}` }), ...(body && { "Content-Type": "application/json" }) };
    let response;
    try {
      response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal, cache: "no-store" });
    } catch (error) {
      throw signal?.aborted ? error : new ConnectionLost("The server cannot be reached.");
    }
    if (response.ok) return response;
    const { error } = await response.json().catch(() => ({}));
    if (response.status === 401 && ask && (await askForToken())) continue;
    throw new Refused(response.status, error ?? { message: `The server answered with status ${response.status}.` });
  }
}

/** The events of a streamed answer. Leaving it early cancels the request. */
export async function* events(path, body, signal) {
  const response = await call(path, { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const lost = () => new ConnectionLost("The connection was lost. What there is of the answer is kept.");
  let held = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw signal.aborted ? error : lost();
    });
    if (done) throw lost();
    const lines = (held + value).split(/\r?\n/);
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(response.status, event.error);
      yield event;
    }
  }
}

export const served = {
  models: [],
  /** The one that is chosen. */
  get model() {
    return this.models.find(({ id }) => id === $("model").value);
  },
  /** Most tokens of prompt and answer together; Infinity while it is not known. */
  get context() {
    return this.model?.max_model_len ?? Infinity;
  },
  /** Most images of a conversation; 0: the model takes text alone. */
  get maxImages() {
    return this.model?.max_images ?? 0;
  },
};

export async function loadModels() {
  const response = await call("v1/models");
  served.models = (await response.json()).data;
  const chosen = $("model").value || $("model").dataset.wanted;
  $("model").replaceChildren(...served.models.map(({ id }) => make("option", { value: id }, id)));
  if (served.models.some(({ id }) => id === chosen)) $("model").value = chosen;
  $("model").dispatchEvent(new Event("change"));
}

/** How many tokens a text is. */
export async function countTokens(text) {
  return (await (await call("tokenize", { body: { prompt: text, add_special_tokens: false } })).json()).count;
}
