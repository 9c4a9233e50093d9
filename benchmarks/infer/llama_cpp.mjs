// llama.cpp by node-llama-cpp, one job a line on stdin, one answer a line on stdout; see llama_cpp.py.
//     node llama_cpp.mjs FOLDER_OF_NODE_MODULES THREADS
// A job: {file, prompt: [ids], tokens: how many steps follow}; an answer: {prompt: s, promptCpu: s, steps: [s], stepCpu: s, ids}
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";
import {join} from "node:path";

const [, , modules, many] = process.argv, threads = Number(many);
const {getLlama, LlamaLogLevel} = await import(pathToFileURL(join(modules, "node-llama-cpp/dist/index.js")));
const llama = await getLlama({gpu: false, build: "never", maxThreads: threads, logLevel: LlamaLogLevel.error});
const now = () => performance.now() / 1e3;
const cpu = () => { const u = process.cpuUsage(); return (u.user + u.system) / 1e6; };
const made = {};

async function sequenceOf(file) {
    if (!made[file]) {
        const model = await llama.loadModel({modelPath: file});
        const context = await model.createContext({contextSize: 1024, batchSize: 512, threads});
        made[file] = context.getSequence();
    }
    await made[file].clearHistory();
    return made[file];
}

for await (const line of createInterface({input: process.stdin})) {
    const {file, prompt, tokens} = JSON.parse(line), sequence = await sequenceOf(file);
    let at = now(), spent = cpu();
    await sequence.evaluateWithoutGeneratingNewTokens(prompt.slice(0, -1));
    const out = {prompt: now() - at, promptCpu: cpu() - spent, steps: [], ids: []};
    at = now(); spent = cpu();
    for await (const id of sequence.evaluate(prompt.slice(-1), {temperature: 0, yieldEogToken: true})) {
        out.steps.push(now() - at);
        out.ids.push(id);
        at = now();
        if (out.steps.length > tokens) break;
    }
    out.stepCpu = (cpu() - spent) / out.steps.length;
    process.stdout.write(JSON.stringify(out) + "\n");
}
await llama.dispose();
