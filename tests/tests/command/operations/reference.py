"""Results of the published networks with onnxruntime: the reference of `kvasir operation` and of the ONNX
`embed`.

    python reference.py OUT_DIR MODELS_DIR IDS.json

MODELS_DIR is the directory of `kvasir models pull`. Writes to OUT_DIR: sound as WAV files, networks that are
made here, and reference.json:

    {"vad":  [{"file", "rate", "windows": [p..], "events": [["speech_started"|"speech_ended", at]..]}],
     "turn": [{"file", "published": p, "published_least": p, "published_most": p, "smooth": p, "features": ..}],
     "embed": [[v..]..]}

turn: `published` is the unchanged network without onnxruntime's fusions. `published_least` and
`published_most` are the range over changes that must not matter: fusions, and the last bit of the features.
`smooth` is the same network with its activations clamped to the range of 8 bits, but not rounded. It is also
written as bundle `smooth`.
"""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import sound as sound_of

OUT, MODELS, IDS = (Path(argument) for argument in sys.argv[1:4])
RATE = 16_000
ort.set_default_logger_severity(3)


def session(model, level=ort.GraphOptimizationLevel.ORT_DISABLE_ALL):
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model, options)


# ---- sound


def write_wav(name, samples, rate):
    return sound_of.write_wav(OUT, name, samples, rate)


def spoken(text, voice, rate=RATE):
    return sound_of.spoken(OUT, text, voice, rate)


def synthetic(seed, seconds, rate=RATE):
    """Harmonics under formants, in syllables, over noise. The sound is near a detector's threshold."""
    rng = np.random.default_rng(seed)
    t = np.arange(int(seconds * rate)) / rate
    pitch = 2 * np.pi * np.cumsum(110 + 40 * np.sin(2 * np.pi * 0.6 * t + rng.uniform(0, 6))) / rate
    voice = sum(
        np.exp(-(((h * 120 - c) / w) ** 2)) * np.sin(h * pitch + rng.uniform(0, 6))
        for h in range(1, 28)
        for c, w in ((550, 160), (1500, 260), (2600, 320))
        if h * 160 < rate / 2
    )
    syllables = np.clip(np.sin(2 * np.pi * 2.7 * t), 0, 1) * np.clip(4 * np.sin(2 * np.pi * 0.3 * t), 0, 1)
    return 0.1 * voice * syllables + rng.normal(0, 0.004, len(t))


# ---- voice activity


def vad_reference(sound, rate):
    model = session(str(MODELS / "silero-vad/vad/silero_vad.onnx"))
    size, context = (512, 64) if rate == 16_000 else (256, 32)
    state, before = np.zeros((2, 1, 128), np.float32), np.zeros(context, np.float32)
    padded = np.pad(sound, (0, -len(sound) % size))
    probabilities = []
    for start in range(0, len(padded), size):
        window = np.concatenate([before, padded[start : start + size]])
        feed = {"input": window[None], "state": state, "sr": np.array(rate, np.int64)}
        answer, state = model.run(None, feed)
        before = window[-context:]
        probabilities.append(float(answer[0, 0]))
    return probabilities, vad_events(probabilities, len(sound), size, rate)


def vad_events(probabilities, samples, size, rate, threshold=0.5, silence_ms=100, pad_ms=30):
    """The rule of silero_vad.utils_vad.VADIterator. Speech at the end of the sound ends there."""
    events, speaks, quiet, now = [], False, 0, 0
    for p in probabilities:
        now += size
        if p >= threshold:
            quiet = 0
            if not speaks:
                speaks = True
                events.append(["speech_started", int(max(0, now - rate * pad_ms / 1000 - size))])
        elif p < threshold - 0.15 and speaks:
            quiet = quiet or now
            if now - quiet >= rate * silence_ms / 1000:
                events.append(["speech_ended", int(quiet + rate * pad_ms / 1000 - size)])
                speaks, quiet = False, 0
    if speaks:
        events.append(["speech_ended", samples])
    return events


def near_the_boundary(make, rate):
    """Returns the factor of loudness with the most windows near the threshold."""
    def near(scale):
        probabilities = np.array(vad_reference((make * scale).astype(np.float32), rate)[0])
        return int((np.abs(probabilities - 0.5) < 0.25).sum())

    return max((near(scale), scale) for scale in np.geomspace(0.005, 0.7, 6))[1]


def vad():
    texts = [("en", "Could you please tell me when the next train to Berlin leaves?"), ("de", "Guten Morgen. Wie geht es?")]
    cases = []
    for rate in (16_000, 8_000):
        voices = [(f"espeak-{voice}", spoken(text, voice, rate)) for voice, text in texts]
        rng = np.random.default_rng(7)
        quiet = lambda seconds: np.zeros(int(seconds * rate))
        pauses = np.concatenate([quiet(0.7), voices[0][1], quiet(1.3), voices[1][1], quiet(0.5)])
        voices.append(("pauses", pauses + rng.normal(0, 0.001, len(pauses))))
        voices.append(("synthetic", synthetic(1, 9.3, rate)))
        for name, sound in list(voices):
            noisy = sound + rng.normal(0, 0.01, len(sound))
            voices.append((f"{name}-boundary", noisy * near_the_boundary(noisy, rate)))
        voices.append(("noise", rng.normal(0, 0.05, 4 * rate)))
        voices.append(("silence", quiet(2.01)))
        for name, sound in voices:
            file = f"vad-{name}-{rate}.wav"
            probabilities, events = vad_reference(write_wav(file, sound, rate), rate)
            cases.append({"file": file, "rate": rate, "windows": probabilities, "events": events})
    return cases


# ---- end of a turn


def feature_code():
    """Loads the feature extraction of the wheel without its other modules."""
    spec = importlib.util.find_spec("pipecat")
    path = Path(spec.submodule_search_locations[0]) / "audio/turn/smart_turn/_whisper_features.py"
    spec = importlib.util.spec_from_file_location("whisper_features", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.compute_whisper_log_mel_features


def smooth(path):
    """Writes the network without the rounding of activations to 8 bits. They are only clamped to the same
    range.
    """
    model = onnx.load(path)
    graph = model.graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    rounded = {node.output[0]: node for node in graph.node if node.op_type == "QuantizeLinear"}
    kept, cut = [], set()
    for node in graph.node:
        if node.op_type == "QuantizeLinear" and node.input[0] not in constants:
            continue
        source = rounded.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if source is not None and source.input[0] not in constants:
            scale, zero = constants[source.input[1]], constants[source.input[2]]
            kind = np.iinfo(zero.dtype)
            for bound, value in (("least", kind.min), ("most", kind.max)):
                limit = (np.float32(value) - zero.astype(np.float32)) * scale
                graph.initializer.append(numpy_helper.from_array(limit.astype(np.float32).reshape(()), f"{node.output[0]}.{bound}"))
            bounds = [f"{node.output[0]}.{bound}" for bound in ("least", "most")]
            kept.append(helper.make_node("Clip", [source.input[0], *bounds], [node.output[0]]))
            cut.add(node.output[0])
            continue
        kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)
    onnx.checker.check_model(model)
    target = OUT / "smooth/turn_detection/smart-turn-v3-smooth.onnx"
    target.parent.mkdir(parents=True)
    onnx.save(model, target)
    return str(target), len(cut)


def turn():
    features_of = feature_code()
    path = str(MODELS / "smart-turn/turn_detection/smart-turn-v3.2-cpu.onnx")
    smooth_path, left_out = smooth(path)
    assert left_out > 50, left_out
    plain, rounded = session(smooth_path), session(path)
    fused = session(path, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    run = lambda model, features: float(model.run(None, {"input_features": features[None]})[0][0, 0])
    texts = [
        "Could you please tell me when the next train to Berlin leaves?",
        "I was thinking that maybe we could",
        "Yes.",
        "My number is five five five, um",
        "The meeting is on Tuesday, and then on Wednesday we will",
    ]
    sounds = [(f"espeak-{at}", spoken(text, "en")) for at, text in enumerate(texts)]
    # Sounds that end in the middle of the speech, that end after a pause, and that exceed the eight seconds
    # of input.
    sounds += [(f"{name}-cut", sound[: len(sound) * 2 // 3]) for name, sound in sounds[:3]]
    sounds += [("pause", np.pad(sounds[0][1], (0, RATE))), ("long", np.concatenate([s for _, s in sounds] * 2))]
    sounds += [("synthetic", synthetic(3, 5)), ("silence", np.zeros(RATE))]
    rng = np.random.default_rng(3)
    cases = []
    for name, sound in sounds:
        sound = write_wav(f"turn-{name}.wav", sound, RATE)
        last = np.pad(sound[-8 * RATE :], (max(0, 8 * RATE - len(sound)), 0))
        features = features_of(last)
        answers = [run(rounded, features), run(fused, features)]
        for _ in range(4):
            direction = rng.choice(np.array([-np.inf, np.inf], np.float32), features.shape)
            answers.append(run(rounded, np.nextafter(features, direction)))
        cases.append({
            "file": f"turn-{name}.wav",
            "published": answers[0],
            "published_least": min(answers),
            "published_most": max(answers),
            "smooth": run(plain, features),
        })
    return cases


# ---- texts


def bert(checkpoint):
    """MiniLM as an ONNX graph with the weights of its checkpoint."""
    raw = checkpoint.read_bytes()
    head = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    data = raw[8 + int.from_bytes(raw[:8], "little") :]
    weights = {}
    for name, tensor in head.items():
        if name != "__metadata__" and tensor["dtype"] == "F32":
            begin, end = tensor["data_offsets"]
            weights[name] = np.frombuffer(data[begin:end], "<f4").reshape(tensor["shape"])
    config = json.loads((checkpoint.parent / "config.json").read_text())
    heads, width = config["num_attention_heads"], config["hidden_size"]
    nodes, constants = [], {}
    count = 0

    def constant(name, value):
        constants[name] = np.ascontiguousarray(value)
        return name

    def op(kind, *inputs, **attributes):
        nonlocal count
        count += 1
        nodes.append(helper.make_node(kind, inputs, [f"v{count}"], **attributes))
        return f"v{count}"

    def weight(name, transposed=False):
        return constant(name, weights[name].T if transposed else weights[name])

    def dense(x, name):
        return op("Add", op("MatMul", x, weight(f"{name}.weight", True)), weight(f"{name}.bias"))

    def norm(x, name):
        scale = [weight(f"{name}.weight"), weight(f"{name}.bias")]
        return op("LayerNormalization", x, *scale, axis=-1, epsilon=config["layer_norm_eps"])

    def gelu(x):
        erf = op("Erf", op("Mul", x, constant("root", np.float32(np.sqrt(0.5)))))
        return op("Mul", op("Mul", x, constant("half", np.float32(0.5))), op("Add", erf, constant("one", np.float32(1))))

    shape_in = constant("split", np.array([0, 0, heads, width // heads], np.int64))
    shape_out = constant("join", np.array([0, 0, width], np.int64))
    length = op("Gather", op("Shape", "input_ids"), constant("second", np.int64(1)))
    places = op("Range", constant("zero", np.int64(0)), length, constant("step", np.int64(1)))
    x = op("Gather", weight("embeddings.word_embeddings.weight"), "input_ids")
    x = op("Add", x, op("Gather", weight("embeddings.token_type_embeddings.weight"), "token_type_ids"))
    x = op("Add", x, op("Gather", weight("embeddings.position_embeddings.weight"), places))
    x = norm(x, "embeddings.LayerNorm")
    unseen = op("Sub", constant("all", np.float32(1)), op("Cast", "attention_mask", to=TensorProto.FLOAT))
    unseen = op("Mul", op("Unsqueeze", unseen, constant("axes", np.array([1, 2], np.int64))), constant("far", np.float32(-1e9)))
    for layer in range(config["num_hidden_layers"]):
        of = f"encoder.layer.{layer}"
        split = lambda name, perm: op("Transpose", op("Reshape", dense(x, f"{of}.attention.self.{name}"), shape_in), perm=perm)
        q, k, v = split("query", [0, 2, 1, 3]), split("key", [0, 2, 3, 1]), split("value", [0, 2, 1, 3])
        scores = op("Mul", op("MatMul", q, k), constant("scale", np.float32((width // heads) ** -0.5)))
        seen = op("MatMul", op("Softmax", op("Add", scores, unseen), axis=-1), v)
        seen = op("Reshape", op("Transpose", seen, perm=[0, 2, 1, 3]), shape_out)
        x = norm(op("Add", dense(seen, f"{of}.attention.output.dense"), x), f"{of}.attention.output.LayerNorm")
        inner = gelu(dense(x, f"{of}.intermediate.dense"))
        x = norm(op("Add", dense(inner, f"{of}.output.dense"), x), f"{of}.output.LayerNorm")
    nodes.append(helper.make_node("Identity", [x], ["last_hidden_state"]))
    ends = ["input_ids", "attention_mask", "token_type_ids"]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "tokens"]) for name in ends]
    output = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["batch", "tokens", width])
    stored = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "minilm", inputs, [output], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def embed():
    """Makes a bundle with the model's own files and the graph, which two backends can load. Returns the
    reference vectors.
    """
    checkpoint = MODELS / "minilm-l6/model.safetensors"
    bundle = OUT / "minilm"
    (bundle / "embed").mkdir(parents=True)
    for file in checkpoint.parent.rglob("*"):
        if file.is_file() and not file.name.startswith("."):
            target = bundle / file.relative_to(checkpoint.parent)
            target.parent.mkdir(exist_ok=True)
            target.symlink_to(file)
    path = bundle / "embed/model.onnx"
    onnx.save(bert(checkpoint), path)
    model = session(str(path))
    vectors = []
    for ids in json.loads(IDS.read_text()):
        row = np.array([ids], np.int64)
        feed = {"input_ids": row, "attention_mask": np.ones_like(row), "token_type_ids": np.zeros_like(row)}
        mean = model.run(None, feed)[0][0].astype(np.float64).mean(0)
        vectors.append((mean / np.linalg.norm(mean)).tolist())
    return vectors


(OUT / "reference.json").write_text(json.dumps({"vad": vad(), "turn": turn(), "embed": embed()}))
