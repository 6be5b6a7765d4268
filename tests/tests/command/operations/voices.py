"""Wake words of openWakeWord and vectors of Resemblyzer, with onnxruntime: the reference of `kvasir operation
wakeword` and `speaker`.

    python voices.py OUT_DIR MODELS_DIR

MODELS_DIR is the directory of `kvasir models pull`. Writes sound as WAV files to OUT_DIR, and voices.json:

    {"wakeword": [{"file", "probabilities": {word: [p..]}}], "speaker": [{"file", "embedding": [v..]}]}

The probabilities are those of the package openwakeword. Its vectors before the first frame, which are of random
noise there, are those of Kvasir's constant noise. Resemblyzer's package needs PyTorch, so its preprocessing is
repeated here; its LSTM is run by onnxruntime.
"""

import collections
import json
import pickle
import sys
import types
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import sound as sound_of

OUT, MODELS = (Path(argument) for argument in sys.argv[1:3])
RATE = 16_000
ort.set_default_logger_severity(3)

# ---- sound

SENTENCES = {
    "alexa": ("en-us", "Alexa, play some music."),
    "jarvis": ("en-us", "Hey Jarvis, what is the weather today?"),
    "timer": ("en-us", "Set a timer for ten minutes please."),
    "german": ("de", "Guten Morgen. Der Zug nach Hamburg hat heute leider eine halbe Stunde Verspätung."),
    "scottish": ("en-gb-scotland", "Would you like some tea with milk, or a cup of coffee without sugar?"),
    "deep": ("en-us+m7", "Would you like some tea with milk, or a cup of coffee without sugar?"),
    "short": ("fr", "Bonjour."),
}


def sounds():
    made = {}
    for name, (voice, text) in SENTENCES.items():
        said = sound_of.spoken(OUT, text, voice, RATE)
        said = np.pad(said, (RATE, RATE // 2)) if name in ("alexa", "jarvis", "timer") else said
        made[f"{name}.wav"] = said
    rng = np.random.default_rng(5)
    noisy = np.concatenate([made["alexa.wav"], made["jarvis.wav"], made["timer.wav"], made["alexa.wav"]])
    made["noisy.wav"] = noisy + rng.normal(0, 0.01, len(noisy))
    made["quiet.wav"] = made["scottish.wav"] * 0.02
    return {name: sound_of.write_wav(OUT, name, samples, RATE) for name, samples in made.items()}


# ---- wake words


def noise():
    state, values = 0, []
    for _ in range(4 * RATE):
        state = (state * 1664525 + 1013904223) % 2**32
        values.append((state >> 16) % 2000 - 1000)
    return np.array(values, np.int16)


def wakeword(samples):
    from openwakeword import MODELS as PATHS
    from openwakeword.model import Model

    folder = MODELS / "openwakeword/wakeword"
    for word, entry in PATHS.items():
        entry["model_path"] = str(folder / f"{word}_v0.1.tflite")
    model = Model(
        inference_framework="onnx",
        melspec_model_path=str(folder / "melspectrogram.onnx"),
        embedding_model_path=str(folder / "embedding_model.onnx"),
    )
    model.preprocessor.feature_buffer = model.preprocessor._get_embeddings(noise())
    whole = np.round(samples * 32768).astype(np.int16)
    whole = np.pad(whole, (0, -len(whole) % 1280))
    frames = [model.predict(frame) for frame in whole.reshape(-1, 1280)]
    # The first five frames are 0 in version 0.6 and, of the last model, in 0.5.1.
    return {word: [0.0] * 5 + [float(frame[word]) for frame in frames[5:]] for word in frames[0]}


# ---- speakers

BANDS, HIDDEN, LAYERS, PART = 40, 256, 3, 160


class Tensors(pickle.Unpickler):
    """Reads PyTorch's older format without PyTorch."""

    def find_class(self, module, name):
        if name == "_rebuild_tensor_v2":
            return lambda storage, offset, shape, stride, *_: (storage, offset, shape)
        if name in ("OrderedDict", "defaultdict"):
            return getattr(collections, name)
        return lambda *arguments: None

    def persistent_load(self, key):
        return key[2]


def weights():
    with open(MODELS / "resemblyzer/speaker/pretrained.pt", "rb") as file:
        for _ in range(3):
            pickle.load(file)
        state = Tensors(file).load()["model_state"]
        keys = pickle.load(file)
        values = {}
        for key in keys:
            count = int.from_bytes(file.read(8), "little")
            values[key] = np.frombuffer(file.read(4 * count), "<f4")
    take = lambda storage, offset, shape: values[storage][offset : offset + int(np.prod(shape))].reshape(shape)
    return {name: take(*tensor) for name, tensor in state.items() if name.startswith(("lstm", "linear"))}


def network():
    """The network as an ONNX graph. PyTorch's gates are input, forget, cell, output; ONNX's input, output,
    forget, cell."""
    of = weights()
    gates = lambda tensor: tensor.reshape(4, HIDDEN, -1)[[0, 3, 1, 2]].reshape(1, 4 * HIDDEN, -1)
    nodes, constants, x = [], {}, "mels"
    for layer in range(LAYERS):
        biases = [gates(of[f"lstm.bias_{part}_l{layer}"])[:, :, 0] for part in ("ih", "hh")]
        constants[f"w{layer}"] = gates(of[f"lstm.weight_ih_l{layer}"])
        constants[f"r{layer}"] = gates(of[f"lstm.weight_hh_l{layer}"])
        constants[f"b{layer}"] = np.concatenate(biases, 1)
        inputs = [x, f"w{layer}", f"r{layer}", f"b{layer}"]
        nodes.append(helper.make_node("LSTM", inputs, [f"y{layer}", f"h{layer}"], hidden_size=HIDDEN))
        nodes.append(helper.make_node("Squeeze", [f"y{layer}", "axis"], [f"x{layer}"]))
        x = f"x{layer}"
    nodes += [
        helper.make_node("Squeeze", [f"h{LAYERS - 1}", "first"], ["last"]),
        helper.make_node("Gemm", ["last", "weight", "bias"], ["linear"], transB=1),
        helper.make_node("Relu", ["linear"], ["vectors"]),
    ]
    constants |= {
        "axis": np.array([1], np.int64),
        "first": np.array([0], np.int64),
        "weight": of["linear.weight"],
        "bias": of["linear.bias"],
    }
    graph = helper.make_graph(
        nodes,
        "resemblyzer",
        [helper.make_tensor_value_info("mels", TensorProto.FLOAT, [PART, "parts", BANDS])],
        [helper.make_tensor_value_info("vectors", TensorProto.FLOAT, ["parts", HIDDEN])],
        [numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return ort.InferenceSession(model.SerializeToString())


def mel_filters():
    """librosa.filters.mel(sr=16000, n_fft=400, n_mels=40): Slaney's scale and areas."""
    to_mel = lambda hz: np.where(hz < 1000, 3 * hz / 200, 15 + np.log(np.maximum(hz, 1e-9) / 1000) * 27 / np.log(6.4))
    to_hz = lambda mel: np.where(mel < 15, 200 * mel / 3, 1000 * np.exp((mel - 15) * np.log(6.4) / 27))
    corners = to_hz(np.linspace(0, to_mel(np.array(8000.0)), BANDS + 2))
    ramps = corners[:, None] - np.linspace(0, 8000, 201)[None]
    gaps = np.diff(corners)
    up, down = -ramps[:-2] / gaps[:-1, None], ramps[2:] / gaps[1:, None]
    return np.maximum(0, np.minimum(up, down)) * (2 / (corners[2:] - corners[:-2]))[:, None]


def mel_spectrogram(wav):
    """librosa.feature.melspectrogram with n_fft=400, hop_length=160 and n_mels=40, transposed."""
    padded = np.pad(wav, 200)
    frames = np.lib.stride_tricks.sliding_window_view(padded, 400)[::160]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    power = np.abs(np.fft.rfft(frames * window, axis=1)) ** 2
    return (power @ mel_filters().T).astype(np.float32)


def slices(count, rate=1.3, min_coverage=0.75):
    """resemblyzer.VoiceEncoder.compute_partial_slices, in frames."""
    step = int(np.round((RATE / rate) / 160))
    steps = max(1, int(np.ceil((count + 1) / 160)) - PART + step + 1)
    starts = list(range(0, steps, step))
    coverage = (count - starts[-1] * 160) / (PART * 160)
    return starts[:-1] if coverage < min_coverage and len(starts) > 1 else starts


def embedding(model, wav):
    """normalize_volume(wav, -30, increase_only=True), then embed_utterance."""
    change = -30 - 20 * np.log10(np.sqrt(np.mean((wav * 32767) ** 2)) / 32767)
    wav = wav * 10 ** (max(change, 0) / 20)
    starts = slices(len(wav))
    wav = np.pad(wav, (0, max(0, (starts[-1] + PART) * 160 - len(wav))))
    mel = mel_spectrogram(wav)
    parts = np.stack([mel[start : start + PART] for start in starts], 1)
    [vectors] = model.run(None, {"mels": parts})
    mean = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).mean(0)
    return (mean / np.linalg.norm(mean)).tolist()


if __name__ == "__main__":
    made = sounds()
    sys.modules.setdefault("requests", types.ModuleType("requests"))
    heard = [name for name in made if name in ("alexa.wav", "jarvis.wav", "timer.wav", "noisy.wav", "deep.wav")]
    model = network()
    reference = {
        "wakeword": [{"file": name, "probabilities": wakeword(made[name])} for name in heard],
        "speaker": [{"file": name, "embedding": embedding(model, wav)} for name, wav in made.items()],
    }
    (OUT / "voices.json").write_text(json.dumps(reference))
