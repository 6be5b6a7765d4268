"""Diarization by pyannote.audio 3's rules, with onnxruntime and scipy: the reference of `kvasir operation
diarization`.

    python diarization.py OUT_DIR MODELS_DIR

MODELS_DIR is the directory of `kvasir models pull`, with resemblyzer and pyannote-diarization. Writes recordings
as WAV files to OUT_DIR, and diarization.json:

    [{"file", "flags": [..], "spoken": [[start, end, voice]..], "segments": [[start, end, speaker]..]}]

Positions are in samples. `spoken` is what was put into the recording. The network is pyannote's segmentation-3.0
as an ONNX graph of its checkpoint, the voices are Resemblyzer's (`voices.py`). The rules are written after
`pipelines/speaker_diarization.py`, `pipelines/clustering.py` and `core/inference.py` of pyannote.audio 3.3.2,
which need PyTorch. Two things are added: nothing is reported after the end of a recording, and speakers are
numbered in order of their first segment.
"""

import collections
import json
import pickle
import sys
import zipfile

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import cdist

import sound as sound_of
import voices

OUT, MODELS, RATE = voices.OUT, voices.MODELS, voices.RATE
WINDOW, STEP, FRAMES, FRAME, FIELD = 10 * RATE, RATE, 589, 270, 991
MIN_ALONE = 6400
THRESHOLD = 0.6


# ---- recordings

TEXTS = [
    "Good morning everybody, and thank you for coming to our weekly meeting. Let us begin with the numbers.",
    "The sales of last month were better than expected, mostly because of the new customers in the north.",
    "I have a question about that. How many of these customers are going to stay with us next year?",
    "That is difficult to say, but in the past about two thirds of them have renewed their contracts.",
    "Then we should talk to the others soon. Who can prepare a list of names before Thursday?",
    "I can do it, if somebody helps me with the addresses. The old list is not complete.",
]


def conversation(speakers, pauses, noise, seed):
    """Turns of espeak-ng's voices one after the other. A negative pause is an overlap."""
    rng = np.random.default_rng(seed)
    sound, spoken = np.zeros(RATE // 2), []
    for (voice, text), pause in zip(speakers, pauses):
        said = sound_of.spoken(OUT, TEXTS[text], voice, RATE)
        start = max(0, len(sound) + int(pause * RATE))
        sound = np.pad(sound, (0, max(0, start + len(said) - len(sound))))
        sound[start : start + len(said)] += said
        spoken.append([start, start + len(said), voice])
    sound = np.pad(sound, (0, RATE // 2))
    return 0.7 * sound + rng.normal(0, noise, len(sound)), spoken


def recordings():
    man, woman, other = "en-us", "en-us+f4", "en-us+klatt2"
    two = [(man, 0), (woman, 1), (man, 2), (woman, 3)]
    three = [(woman, 0), (man, 1), (other, 2), (man, 3), (woman, 4), (other, 5)]
    return {
        "two.wav": (conversation(two, [0.3, 0.5, 0.4, 0.2], 0.002, 1), []),
        "overlap.wav": (conversation(two, [0.3, -1.5, -1.0, -2.0], 0.002, 2), []),
        "three.wav": (conversation(three, [0, 0.4, -0.8, 0.3, 0.5, -0.5], 0.005, 3), []),
        "forced.wav": (conversation(three, [0, 0.4, 0.2, 0.3, 0.5, 0.5], 0.005, 4), ["--num-speakers", "3"]),
        "short.wav": (conversation([(man, 2)], [0.1], 0.001, 5), ["--max-speakers", "1"]),
        "silence.wav": ((np.zeros(3 * RATE), []), []),
    }


# ---- segmentation


class Tensors(pickle.Unpickler):
    """Reads PyTorch's archives without PyTorch."""

    def find_class(self, module, name):
        if name == "_rebuild_tensor_v2":
            return lambda storage, offset, shape, stride, *_: (storage, offset, shape)
        if name == "OrderedDict":
            return collections.OrderedDict
        return type(name, (), {"__init__": lambda self, *_: None, "__setstate__": lambda self, *_: None})

    def persistent_load(self, key):
        return key[2]


def weights():
    with zipfile.ZipFile(MODELS / "pyannote-diarization/diarization/pytorch_model.bin") as archive:
        with archive.open("archive/data.pkl") as file:
            state = Tensors(file).load()["state_dict"]
        values = {}
        for name, (storage, offset, shape) in state.items():
            data = np.frombuffer(archive.read(f"archive/data/{storage}"), "<f4")
            values[name] = data[offset : offset + int(np.prod(shape))].reshape(shape)
    return values


def filters(of):
    """asteroid_filterbanks.ParamSincFB: 80 filters of 251 taps at 16 kHz."""
    bank = lambda name: of[f"sincnet.conv1d.0.filterbank.{name}"].astype(np.float64)
    low = 50 + np.abs(bank("low_hz_"))
    high = np.clip(low + 50 + np.abs(bank("band_hz_")), 50, RATE / 2)
    time, window, band = bank("n_"), bank("window_"), (high - low)
    even = (np.sin(high @ time) - np.sin(low @ time)) / (time / 2) * window
    odd = (np.cos(low @ time) - np.cos(high @ time)) / (time / 2) * window
    even = np.concatenate([even, 2 * band, even[:, ::-1]], 1) / (2 * band)
    odd = np.concatenate([odd, 0 * band, -odd[:, ::-1]], 1) / (2 * band)
    return np.concatenate([even, odd])[:, None].astype(np.float32)


def network():
    of, nodes, constants = weights(), [], {}

    def op(kind, *inputs, outputs=1, **attributes):
        names = [f"v{len(nodes)}_{at}" for at in range(outputs)]
        nodes.append(helper.make_node(kind, inputs, names, **attributes))
        return names[0]

    def constant(name, value):
        constants[name] = np.ascontiguousarray(value)
        return name

    weight = lambda name: constant(name, of[name])
    norm = lambda x, name: op("InstanceNormalization", x, weight(f"{name}.weight"), weight(f"{name}.bias"), epsilon=1e-5)
    x = norm("audio", "sincnet.wav_norm1d")
    x = op("Abs", op("Conv", x, constant("filters", filters(of)), strides=[10]))
    for layer in range(3):
        if layer:
            x = op("Conv", x, weight(f"sincnet.conv1d.{layer}.weight"), weight(f"sincnet.conv1d.{layer}.bias"))
        x = op("MaxPool", x, kernel_shape=[3], strides=[3])
        x = op("LeakyRelu", norm(x, f"sincnet.norm1d.{layer}"), alpha=0.01)
    x = op("Transpose", x, perm=[2, 0, 1])
    # PyTorch's gates are input, forget, cell, output; ONNX's input, output, forget, cell.
    gates = lambda name: of[name].reshape(4, 128, -1)[[0, 3, 1, 2]].reshape(512, -1)
    for layer in range(4):
        stack = lambda part: np.stack([gates(f"lstm.{part}_l{layer}{side}") for side in ("", "_reverse")])
        biases = np.concatenate([stack("bias_ih"), stack("bias_hh")], 1)[:, :, 0]
        inputs = [constant(f"w{layer}", stack("weight_ih")), constant(f"r{layer}", stack("weight_hh")), constant(f"b{layer}", biases)]
        x = op("LSTM", x, *inputs, hidden_size=128, direction="bidirectional")
        x = op("Reshape", op("Transpose", x, perm=[0, 2, 1, 3]), constant("join", np.array([0, 0, -1], np.int64)))
    for name, is_last in (("linear.0", False), ("linear.1", False), ("classifier", True)):
        x = op("Add", op("MatMul", x, constant(f"{name}.weight", of[f"{name}.weight"].T)), weight(f"{name}.bias"))
        x = x if is_last else op("LeakyRelu", x, alpha=0.01)
    nodes.append(helper.make_node("Identity", [x], ["scores"]))
    value = lambda name, shape: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
    graph = helper.make_graph(
        nodes,
        "segmentation",
        [value("audio", ["windows", 1, WINDOW])],
        [value("scores", [FRAMES, "windows", 7])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return ort.InferenceSession(model.SerializeToString())


POWERSET = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1]])


def windows_of(wav):
    """Inference.slide: complete windows, then one that is padded with zeros."""
    complete = max(0, (len(wav) - WINDOW) // STEP + 1)
    windows = [wav[at * STEP : at * STEP + WINDOW] for at in range(complete)]
    if len(wav) < WINDOW or (len(wav) - WINDOW) % STEP > 0:
        rest = wav[complete * STEP :]
        windows.append(np.pad(rest, (0, WINDOW - len(rest))))
    return np.stack(windows).astype(np.float32)


# ---- voices and clusters


def embeddings(model, windows, segmented):
    vectors = np.full((len(windows), 3, voices.HIDDEN), np.nan)
    frame_of = np.arange(WINDOW) * FRAMES // WINDOW
    enough = np.ceil(FRAMES * MIN_ALONE / WINDOW)
    for at, (wav, masks) in enumerate(zip(windows, segmented)):
        alone = masks * (masks.sum(1, keepdims=True) < 2)
        for speaker in range(3):
            mask = alone[:, speaker] if alone[:, speaker].sum() > enough else masks[:, speaker]
            if mask.any():
                vectors[at, speaker] = voices.embedding(model, wav[mask[frame_of] > 0])
    return vectors


def cluster(train, minimum, maximum, number, threshold=THRESHOLD):
    """AgglomerativeClustering.cluster with centroid linkage."""
    count = len(train)
    size = min(12, max(1, round(0.1 * count)))
    if count == 1:
        return np.zeros(1, int)
    train = train / np.linalg.norm(train, axis=1, keepdims=True)
    dendrogram = linkage(train, method="centroid", metric="euclidean")

    def cut(tree, limit):
        clusters = fcluster(tree, limit, criterion="distance") - 1
        names, counts = np.unique(clusters, return_counts=True)
        return clusters, names[counts >= size], names[counts < size]

    clusters, large, small = cut(dendrogram, threshold)
    if len(large) < minimum:
        number = minimum
    elif len(large) > maximum:
        number = maximum
    if number is not None and len(large) != number:
        tree = dendrogram.copy()
        tree[:, 2] = np.arange(count - 1)
        best, best_large = count - 1, 1
        for step in np.argsort(np.abs(dendrogram[:, 2] - threshold), kind="stable"):
            if tree[step, 3] < size:
                continue
            clusters, large, small = cut(tree, step)
            if abs(len(large) - number) < abs(best_large - number):
                best, best_large = step, len(large)
            if len(large) == number:
                break
        if best_large != number:
            clusters, large, small = cut(tree, best)
    if not len(large):
        return np.zeros(count, int)
    if len(small):
        mean = lambda names: np.stack([train[clusters == name].mean(0) for name in names])
        nearest = np.argmin(cdist(mean(large), mean(small), metric="cosine"), axis=0)
        for name, target in zip(small, nearest):
            clusters[clusters == name] = large[target]
        clusters = np.unique(clusters, return_inverse=True)[1]
    return clusters


def assigned(vectors, segmented, number, minimum, maximum):
    """BaseClustering.__call__: the cluster of each local speaker of each window."""
    active = (segmented.sum(1) > 0) & ~np.isnan(vectors).any(2)
    train = vectors[active]
    minimum = max(1, min(len(train), number or minimum or 1))
    maximum = max(1, min(len(train), number or maximum or len(train)))
    number = minimum if minimum == maximum else number
    if maximum < 2:
        return np.zeros(segmented.shape[::2], int)
    clusters = cluster(train, minimum, maximum, number)
    centroids = np.stack([train[clusters == name].mean(0) for name in range(clusters.max() + 1)])
    distances = cdist(vectors.reshape(-1, vectors.shape[2]), centroids, metric="cosine")
    return np.argmax(2 - distances, axis=1).reshape(segmented.shape[::2])


# ---- time


def aggregate(scores):
    """Inference.aggregate: sums over windows and the number of windows, for each frame."""
    last = len(scores) - 1
    frames = int(np.rint((last * STEP + WINDOW) / FRAME)) + 1
    sums, counts = np.zeros((frames, scores.shape[2]), np.float32), np.zeros(frames, np.float32)
    for at, score in enumerate(scores):
        start = int(np.rint(at * STEP / FRAME))
        sums[start : start + FRAMES] += np.nan_to_num(score)
        counts[start : start + FRAMES] += 1
    return sums, counts


def diarize(wav, segmentation, voice, number=None, minimum=None, maximum=None):
    windows = windows_of(wav)
    scores = np.concatenate([segmentation.run(None, {"audio": windows[at : at + 8, None]})[0] for at in range(0, len(windows), 8)], 1)
    segmented = POWERSET[scores.argmax(2)].transpose(1, 0, 2)
    total, covered = aggregate(segmented.sum(2, keepdims=True))
    count = np.rint(total[:, 0] / np.maximum(covered, 1e-12)).astype(int)
    if not count.any():
        return []
    if (number or maximum) == 1:
        clusters = np.zeros(segmented.shape[::2], int)
    else:
        clusters = assigned(embeddings(voice, windows, segmented), segmented, number, minimum, maximum)
    count = np.minimum(count, number or maximum or 100)
    clusters[segmented.sum(1) == 0] = -2
    clustered = np.full((len(windows), FRAMES, clusters.max() + 1), np.nan)
    for at, names in enumerate(clusters):
        for name in set(names) - {-2}:
            clustered[at, :, name] = segmented[at][:, names == name].max(1)
    activity, _ = aggregate(clustered)
    speaks = np.zeros(activity.shape, bool)
    for frame, order in enumerate(np.argsort(-activity, axis=1, kind="stable")):
        speaks[frame, order[: count[frame]]] = True
    return segments(speaks, len(wav))


def segments(speaks, end):
    """Binarize: from the middle of the first frame to the middle of the first frame without."""
    middle = lambda frame: min(end, int(frame * FRAME + FIELD // 2))
    found = []
    for speaker, row in enumerate(speaks.T):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row[:-1], [0]]).astype(int)))
        found += [[middle(a), middle(b), speaker] for a, b in edges.reshape(-1, 2) if middle(a) < middle(b)]
    found.sort()
    numbers = {}
    return [[start, stop, numbers.setdefault(speaker, len(numbers))] for start, stop, speaker in found]


def main():
    segmentation, voice, cases = network(), voices.network(), []
    for name, ((sound, spoken), flags) in recordings().items():
        wav = sound_of.write_wav(OUT, name, sound, RATE)
        options = {"--num-speakers": "number", "--max-speakers": "maximum"}
        options = {options[flag]: int(value) for flag, value in zip(flags[::2], flags[1::2])}
        found = diarize(wav, segmentation, voice, **options)
        cases.append({"file": name, "flags": flags, "spoken": spoken, "segments": found})
    (OUT / "diarization.json").write_text(json.dumps(cases))


if __name__ == "__main__":
    main()
