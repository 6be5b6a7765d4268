"""Results of onnxruntime's LSTM near a decision boundary, for weights in both orders of gates.

    python reference.py > reference.json        # needs numpy, onnx, onnxruntime

A network of two directions is followed by a decision for each direction: the sign of a product of its last
output. Inputs are scaled until the sign changes, and taken 1 % to either side. With the gates in the wrong order
many decisions are different. Weights are multiples of 1/16, so that they are exact in JSON and in f32.
"""

import json

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

HIDDEN, INPUTS, TIMES, CASES = 3, 2, 7, 12
GATES = ("input", "forget", "cell", "output")
ORDERS = {
    "pytorch": ("input", "forget", "cell", "output"),
    "onnx": ("input", "output", "forget", "cell"),
}
rng = np.random.default_rng(31)
sixteenths = lambda *shape: rng.integers(-40, 41, shape).astype(np.float32) / 16


def stored(gates, order):
    """The arrays of a file: the gates' rows in its order."""
    return [np.concatenate([gates[gate][part] for gate in ORDERS[order]]) for part in range(4)]


def network(directions):
    """An ONNX model from arrays that are taken to be in ONNX's order."""
    stack = lambda part: np.stack([direction[part] for direction in directions])
    constants = {
        "W": stack(0),
        "R": stack(1),
        "B": np.stack([np.concatenate(direction[2:]) for direction in directions]),
    }
    node = helper.make_node("LSTM", ["x", *constants], ["y"], hidden_size=HIDDEN, direction="bidirectional")
    value = lambda name, shape: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
    graph = helper.make_graph(
        [node],
        "lstm",
        [value("x", [TIMES, 1, INPUTS])],
        [value("y", [TIMES, 2, 1, HIDDEN])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    return ort.InferenceSession(model.SerializeToString())


def by_definition(gates, x):
    """The outputs of one direction in f64, from the definition."""
    sigmoid = lambda value: 1 / (1 + np.exp(-value))
    h = c = np.zeros(HIDDEN)
    outputs = []
    for row in x.astype(np.float64):
        value = {gate: w @ row + r @ h + b + rb for gate, (w, r, b, rb) in gates.items()}
        c = sigmoid(value["forget"]) * c + sigmoid(value["input"]) * np.tanh(value["cell"])
        h = sigmoid(value["output"]) * np.tanh(c)
        outputs.append(h)
    return np.array(outputs)


def main():
    layer = [
        {gate: (sixteenths(HIDDEN, INPUTS), sixteenths(HIDDEN, HIDDEN), sixteenths(HIDDEN), sixteenths(HIDDEN)) for gate in GATES}
        for _ in range(2)
    ]
    right = network([stored(gates, "onnx") for gates in layer])
    wrong = network([stored(gates, "pytorch") for gates in layer])
    run = lambda model, x: model.run(None, {"x": x[:, None].astype(np.float32)})[0][:, :, 0]
    directions = []
    for direction, gates in enumerate(layer):
        last = -1 if direction == 0 else 0
        readout = sixteenths(HIDDEN)
        decide = lambda model, x: float(run(model, x)[last, direction] @ readout)
        cases = []
        while len(cases) < CASES:
            x = rng.normal(0, 1, (TIMES, INPUTS))
            scales = np.geomspace(0.05, 4, 200)
            signs = [decide(right, scale * x) > 0 for scale in scales]
            change = next((at for at in range(1, 200) if signs[at] != signs[at - 1]), None)
            if change is None:
                continue
            below, above = scales[change - 1], scales[change]
            for _ in range(30):
                middle = (below + above) / 2
                below, above = (middle, above) if (decide(right, middle * x) > 0) == signs[change - 1] else (below, middle)
            for factor in (0.99, 1.01):
                near = (below * factor * x).astype(np.float32)
                outputs = run(right, near)
                expected = by_definition(gates, near if direction == 0 else near[::-1])
                expected = expected if direction == 0 else expected[::-1]
                assert np.abs(outputs[:, direction] - expected).max() < 1e-6
                cases.append({
                    "x": near.ravel().tolist(),
                    "outputs": expected.ravel().tolist(),
                    "decision": decide(right, near),
                    "wrong": decide(wrong, near),
                })
        cases = [case for case in cases if abs(case["decision"]) < 0.1]
        assert len(cases) >= CASES // 2
        directions.append({
            "readout": readout.tolist(),
            **{order: [array.ravel().tolist() for array in stored(gates, order)] for order in ORDERS},
            "cases": cases,
        })
    print(json.dumps({"hidden": HIDDEN, "inputs": INPUTS, "directions": directions}))


main()
