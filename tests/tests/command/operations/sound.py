"""Sound for the references of operations."""

import subprocess
import wave

import numpy as np

RATE = 16_000


def write_wav(out, name, samples, rate):
    """Writes samples as 16-bit integers. Returns these as floats."""
    whole = np.clip(np.round(samples * 32768), -32768, 32767).astype("<i2")
    with wave.open(str(out / name), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(whole.tobytes())
    return whole.astype(np.float32) / 32768


def spoken(out, text, voice, rate=RATE):
    """Speech of espeak-ng, resampled by a windowed sinc."""
    path = out / "spoken.wav"
    subprocess.run(["espeak-ng", "-v", voice, "-w", str(path), text], check=True)
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        own, sound = file.getframerate(), np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768
    path.unlink()
    width, cut = 32, min(1.0, rate / own)
    at = np.arange(int(len(sound) * rate / own)) * own / rate
    first = np.floor(at).astype(int)
    padded = np.pad(sound, (width, width + 1))
    taps = np.arange(1 - width, width + 1)
    distance = at[:, None] - (first[:, None] + taps)
    weights = cut * np.sinc(cut * distance) * np.cos(np.pi * distance / (2 * width + 2)) ** 2
    return (padded[first[:, None] + taps + width] * weights).sum(1)
