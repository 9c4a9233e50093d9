// What llama.cpp makes of GGUF files, by node-llama-cpp: jobs as JSON on stdin, answers as JSON on stdout.
//     node llama_cpp.mjs FOLDER_OF_NODE_MODULES
// A job: {file, lora?, text? or ids, logits?: true, tokens?: how many to write greedily}
// An answer: {ids, logits?: [[…] per position], written?: [ids], said?: text} or {error}
import {pathToFileURL} from "node:url";
import {readFileSync} from "node:fs";
import {join} from "node:path";

const {getLlama, LlamaLogLevel} = await import(pathToFileURL(join(process.argv[2], "node-llama-cpp/dist/index.js")));
const llama = await getLlama({gpu: false, build: "never", maxThreads: 1, logLevel: LlamaLogLevel.error});

async function answer({file, lora, text, ids, logits, tokens}) {
    const model = await llama.loadModel({modelPath: file, useMmap: true});
    const cache = "F32";
    const context = await model.createContext({
        contextSize: 256, threads: 1, lora, flashAttention: false, experimentalKvCacheKeyType: cache, experimentalKvCacheValueType: cache
    });
    const given = ids ?? Array.from(model.tokenize(text, true)), out = {ids: given};
    const sequence = context.getSequence();
    if (logits) {
        const asked = given.map(id => [id, {generateNext: {logits: true}}]);
        const found = await sequence.controlledEvaluate(asked);
        out.logits = found.map(({next}) => Array.from(next.logits).sort((a, b) => a[0] - b[0]).map(([, v]) => v));
    }
    if (tokens) {
        await sequence.clearHistory();
        out.written = [];
        for await (const id of sequence.evaluate(given, {temperature: 0, yieldEogToken: true})) {
            out.written.push(id);
            if (out.written.length === tokens) break;
        }
        if (text !== undefined) out.said = model.detokenize(out.written);
    }
    await model.dispose();
    return out;
}

const answers = [];
for (const job of JSON.parse(readFileSync(0, "utf8"))) {
    try { answers.push(await answer(job)); } catch (e) { answers.push({error: String(e?.stack ?? e)}); }
}
process.stdout.write(JSON.stringify(answers));
await llama.dispose();
