/* What the browser keeps: conversations, their turns and tokens, and single values, in IndexedDB. Never the token of the server.
 *
 * conversations: {id, title, isNamed, created, updated, chosen}; times in milliseconds since the epoch.
 * turns: {id, conversation, parent, kind, order, chosen, text, ...}, as turns.js has them; parent and chosen are ids or null.
 * tokens: {id, ...} of the answers among the turns, apart since they are much more.
 * values: by name.
 */

const NAME = `aengine ${location.pathname}`; // of several servers behind one proxy each has its own
const FORMAT = "aengine-chat";
const VERSION = 1;
const STORES = ["conversations", "turns", "tokens", "values"];

let opened = null;
let database = null; // once it is there: what a page that is being left begins after a wait never ends

function open() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      request.result.createObjectStore("turns", { keyPath: "id" }).createIndex("conversation", "conversation");
      request.result.createObjectStore("tokens", { keyPath: "id" });
      request.result.createObjectStore("values");
    };
    request.onsuccess = () => {
      database = request.result;
      database.onversionchange = () => database.close();
      resolve(database);
    };
    request.onerror = request.onblocked = () => reject(request.error ?? new Error("The storage of the browser is in use."));
  });
  return opened;
}

/** Runs `work`, which is given the stores, in one transaction; the result of the request that it returns. */
async function transact(mode, work) {
  if (!database) await open();
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(STORES, mode);
    const request = work(Object.fromEntries(STORES.map((name) => [name, transaction.objectStore(name)])));
    if (mode === "readwrite") transaction.commit();
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
  });
}

export const read = (store, key) => transact("readonly", (stores) => stores[store].get(key));
export const readAll = (store) => transact("readonly", (stores) => stores[store].getAll());
export const keepValue = (name, value) => transact("readwrite", ({ values }) => void (value === undefined ? values.delete(name) : values.put(value, name)));

/** Keeps a conversation, turns of it, and tokens of those. */
export function keep({ conversation = null, turns = [], tokens = [] }) {
  return transact("readwrite", (stores) => {
    if (conversation) stores.conversations.put(conversation);
    for (const turn of turns) stores.turns.put(turn);
    for (const one of tokens) stores.tokens.put(one);
  });
}

/** The turns of a conversation, oldest first, and the tokens of each by its id. */
export async function readTurns(conversation) {
  const turns = await transact("readonly", (stores) => stores.turns.index("conversation").getAll(conversation));
  turns.sort((a, b) => a.order - b.order);
  const tokens = new Map();
  await transact("readonly", (stores) => {
    for (const { id } of turns) stores.tokens.get(id).onsuccess = ({ target }) => target.result && tokens.set(id, target.result);
  });
  return { turns, tokens };
}

export async function remove(conversation) {
  const ids = await transact("readonly", (stores) => stores.turns.index("conversation").getAllKeys(conversation));
  await transact("readwrite", (stores) => {
    stores.conversations.delete(conversation);
    stores.values.delete(`draft ${conversation}`);
    for (const id of ids) (stores.turns.delete(id), stores.tokens.delete(id));
  });
}

/** The ids of the conversations that hold `text` in a turn, in any case. */
export async function search(text) {
  const wanted = text.toLowerCase();
  const found = new Set();
  await transact("readonly", (stores) => {
    stores.turns.openCursor().onsuccess = ({ target: { result: cursor } }) => {
      if (!cursor) return;
      if (cursor.value.text.toLowerCase().includes(wanted)) found.add(cursor.value.conversation);
      cursor.continue();
    };
  });
  return found;
}

/** All that is kept, for a file. */
export async function exported() {
  const data = { format: FORMAT, version: VERSION };
  for (const name of STORES.slice(0, 3)) data[name] = await readAll(name);
  const keys = await transact("readonly", ({ values }) => values.getAllKeys());
  data.values = {};
  for (const key of keys) data.values[key] = await read("values", key);
  return data;
}

/* What the parts of such a file must be. */

const isText = (value) => typeof value === "string";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const isFlag = (value) => typeof value === "boolean";
const isAny = (value) => value === undefined || value === null || typeof value === "object";
const orNull = (check) => (value) => value === null || check(value);
const maybe = (check) => (value) => value === undefined || value === null || check(value);
const listOf = (check) => (value) => Array.isArray(value) && value.every(check);
const object = (fields) => (value) =>
  typeof value === "object" && value !== null && !Array.isArray(value) && Object.entries(fields).every(([name, check]) => check(value[name]));
const row = (...checks) => (value) => Array.isArray(value) && value.length === checks.length && checks.every((check, i) => check(value[i]));

const FILE = (value) => object({ name: isText, text: isText })(value) || object({ name: isText, image: (url) => isText(url) && url.startsWith("data:image/") })(value);
const DRAFT = object({ text: isText, files: listOf(FILE) });
const RESULT = object({ role: isText, tool_call_id: isText, content: isText });
const CALL = object({ id: maybe(isText), name: isText, text: isText, result: isText });
const isKind = (kind) => (value) => value === kind;
const PLACED = { id: isText, conversation: isText, parent: orNull(isText), order: isNumber, chosen: orNull(isText), text: isText };
const SENT = object({ ...PLACED, kind: isKind("user"), content: object({ text: isText, files: listOf(FILE), results: orNull(listOf(RESULT)) }) });
const ANSWER = object({
  ...{ ...PLACED, kind: isKind("answer"), settings: object({}), mark: isText, taken: isNumber, calls: listOf(CALL), meta: isText },
  ...{ notes: maybe(object({ text: isText, isWrong: isFlag })), finish: maybe(isText) },
});
const PIECE = row((kind) => ["reasoning", "content"].includes(kind), isText);
const TOKEN = row(isNumber, isText, orNull(isNumber), isNumber, listOf(PIECE), listOf(row(isNumber, isText, isNumber)));
const SHAPES = {
  conversations: object({ id: isText, title: isText, isNamed: isFlag, created: isNumber, updated: isNumber, chosen: orNull(isText) }),
  turns: (value) => SENT(value) || ANSWER(value),
  tokens: object({ id: isText, promptIds: orNull(listOf(isNumber)), raw: isText, tokens: listOf(TOKEN) }),
};

/** Keeps what a file of `exported` holds; a conversation that is there stays as it is where it is the newer one. Returns how many there
 * were. Raises `Error` for a file of another kind, and then nothing is changed. */
export async function imported(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  if (data?.format !== FORMAT) throw new Error("This file was not exported by this page.");
  if (data.version !== VERSION) throw new Error(`This file has version ${data.version}; this page reads ${VERSION}.`);
  for (const [name, shape] of Object.entries(SHAPES)) {
    if (!Array.isArray(data[name])) throw new Error(`${name} is not there.`);
    const wrong = data[name].findIndex((one) => !shape(one));
    if (wrong >= 0) throw new Error(`${name}[${wrong}] is not what it must be.`);
  }
  if (!isAny(data.values)) throw new Error("values is not what it must be.");
  const known = new Map((await readAll("conversations")).map((one) => [one.id, one.updated]));
  const newer = data.conversations.filter(({ id, updated }) => !(known.get(id) >= updated));
  const taken = new Set(newer.map(({ id }) => id));
  const turns = data.turns.filter(({ conversation }) => taken.has(conversation));
  const ids = new Set(turns.map(({ id }) => id));
  await transact("readwrite", (stores) => {
    for (const one of newer) stores.conversations.put(one);
    for (const one of turns) stores.turns.put(one);
    for (const one of data.tokens) if (ids.has(one.id)) stores.tokens.put(one);
    for (const [name, value] of Object.entries(data.values ?? {})) {
      if (name === "settings" ? object({})(value) : name.startsWith("draft ") && DRAFT(value)) stores.values.put(value, name);
    }
  });
  return newer.length;
}
