"""Speech of Kokoro's network as onnxruntime runs it.

    python kokoro.py OUT MODELS   writes OUT/speech.json, and of case N OUT/N.s16 and the bundle OUT/N
    python kokoro.py OUT          prints the correlations of OUT/N.wav with OUT/N.s16 as a list

The phonemes are those of misaki 0.9.4 (EspeakFallback with espeak-ng 1.52). The network has no random noise. But it
rounds the lengths of phonemes, and reads the phases of a Fourier transform also where the transform is zero but for
rounding. So a bundle's network has these two as constants with the values of onnxruntime's run, which gives the same
audio with them. The last case is the first one with each runtime's own transform.
"""

import json
import sys
import wave
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

NETWORK, VOCABULARY, VOICES = "kokoro-v1.0.int8.onnx", "vocab.json", "voices_ja.npz"
RATE = 24_000
# A text, its voice, its speed and its phonemes.
CASES = [
    ("Hello, world!", "jf_alpha", 1, "həlˈO, wˈɜɹld!"),
    ("It cost three dollars and fifty cents.", "jm_kumo", 1, "ɪt kˈɔst θɹˈi dˈɑləɹz ænd fˈɪfti sˈɛnts."),
    ("Where did you put the keys?", "jf_nezumi", 1.25, "wˌɛɹ dˈɪd ju pˌʊt ðə kˈiz?"),
]
# The phonemes' lengths in frames of 1/40 s at a speed of 1, before they are rounded; the transform.
CONSTANTS = ["/encoder/predictor/ReduceSum_output_0", "/decoder/decoder/generator/STFT_output_0"]


def make_constant(graph, name, values):
    """Replaces the node with this result."""
    graph.node.remove(next(node for node in graph.node if name in node.output))
    graph.initializer.append(onnx.numpy_helper.from_array(values, name))


def make(out, models):
    network = next(models.rglob(NETWORK))
    ids = json.loads(network.with_name(VOCABULARY).read_text())["vocab"]
    voices = np.load(network.with_name(VOICES))
    model = onnx.load(network)
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    watched.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in CONSTANTS)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(watched.SerializeToString(), options, providers=["CPUExecutionProvider"])
    cases = []
    all_constants = [*((case, CONSTANTS) for case in CASES), (CASES[0], CONSTANTS[:1])]
    for at, ((text, voice, speed, phonemes), constants) in enumerate(all_constants):
        tokens = [ids[phoneme] for phoneme in phonemes]
        inputs = {
            "tokens": np.array([[0, *tokens, 0]]),
            "style": voices[voice][len(tokens) - 1].reshape(1, -1),
            "speed": np.array([speed], np.float32),
        }
        audio, *values = session.run(["audio", *constants], inputs)
        constant = onnx.ModelProto()
        constant.CopyFrom(model)
        for name, value in zip(constants, values):
            make_constant(constant.graph, name, value)
        (np.clip(audio, -1, 1) * 32767).astype("<i2").tofile(out / f"{at}.s16")
        bundle = out / str(at) / "tts"
        bundle.mkdir(parents=True)
        onnx.save(constant, bundle / NETWORK)
        for file in (VOCABULARY, VOICES):
            (bundle / file).symlink_to(network.with_name(file))
        case = {"text": text, "voice": voice, "speed": speed, "file": f"{at}.s16", "bundle": str(at)}
        cases.append(case)
    (out / "speech.json").write_text(json.dumps({"rate": RATE, "cases": cases}))


def log_mel(samples):
    """Of 80 bands from 0 to 12 kHz, with windows of 1,024 samples every 256, as of vocoders."""
    window, hop, bands = 1024, 256, 80
    frames = np.lib.stride_tricks.sliding_window_view(np.pad(samples / 32768, window // 2), window)[::hop]
    spectrum = np.abs(np.fft.rfft(frames * np.hanning(window + 1)[:-1], axis=1))
    to_mel = lambda hz: 2595 * np.log10(1 + hz / 700)
    corners = 700 * (10 ** (np.linspace(0, to_mel(RATE / 2), bands + 2) / 2595) - 1)
    ramps = corners[:, None] - np.linspace(0, RATE / 2, window // 2 + 1)
    gaps = np.diff(corners)[:, None]
    filters = np.maximum(0, np.minimum(-ramps[:-2] / gaps[:-1], ramps[2:] / gaps[1:]))
    return np.log(np.maximum(spectrum @ filters.T, 1e-5))


def compare(out):
    correlations = []
    for at in range(len(CASES) + 1):
        with wave.open(str(out / f"{at}.wav")) as file:
            found = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        expected = np.fromfile(out / f"{at}.s16", "<i2")
        correlations.append(np.corrcoef(log_mel(found).ravel(), log_mel(expected).ravel())[0, 1])
    print(json.dumps(correlations))


if __name__ == "__main__":
    {1: compare, 2: make}[len(sys.argv) - 1](*map(Path, sys.argv[1:]))
