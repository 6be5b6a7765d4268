"""Draws two plots as SVG: bars of a replay, and lines of simulated fleets."""
import math
from xml.sax.saxutils import escape

COLOURS = ["#0b3c5d", "#1b6ca8", "#7fb2d6", "#a8a8a8", "#c96f2e", "#5b8c3a"]


class Canvas:
    """Shapes in pixels from the top left corner."""

    def __init__(self, width, height):
        self.size, self.shapes = (width, height), []

    def text(self, x, y, text, size=11, anchor="start", colour="#222"):
        self.shapes.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">'
                           f"{escape(str(text))}</text>")

    def line(self, points, colour="#ccc", width=1.0, dash=None):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.shapes.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashed}/>')

    def box(self, x, y, width, height, colour):
        self.shapes.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" fill="{colour}"/>')

    def dot(self, x, y, colour):
        self.shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{colour}"/>')

    def write(self, path):
        width, height = self.size
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        body = "\n".join(self.shapes)
        path.write_text(f'{head}font-family="sans-serif">\n<rect width="{width}" height="{height}" fill="#fff"/>\n{body}\n</svg>\n')


def bars(path, rows, panels):
    """`rows`: (name, {key: value}). `panels`: (title, key, format). One bar per row in each panel."""
    names, wide, line = 130, 190, 20
    canvas = Canvas(names + len(panels) * (wide + 20), 40 + line * len(rows))
    for at, (name, _) in enumerate(rows):
        canvas.text(names - 8, 45 + line * at, name, anchor="end")
    for column, (title, key, shown) in enumerate(panels):
        left = names + column * (wide + 20)
        most = max(values[key] for _, values in rows) or 1.0
        canvas.text(left, 16, title)
        for at, (_, values) in enumerate(rows):
            length = (wide - 60) * values[key] / most
            canvas.box(left, 33 + line * at, length, line - 6, COLOURS[at % len(COLOURS)])
            canvas.text(left + length + 5, 45 + line * at, shown.format(values[key]), size=10)
    canvas.write(path)


def lines(path, series, columns, panels):
    """`series`: {name: [row]}. A row has `workers`, `load` and the keys of the panels. `columns`: loads.
    `panels`: (title, key).
    """
    wide, high, left, top = 230, 150, 40, 46
    canvas = Canvas(left + len(columns) * (wide + 30), top + len(panels) * (high + 50))
    for at, name in enumerate(series):
        canvas.line([(left + at * 125, 14), (left + 18 + at * 125, 14)], COLOURS[at % len(COLOURS)], 2)
        canvas.text(left + 23 + at * 125, 18, name, size=10)
    for row, (title, key) in enumerate(panels):
        for column, load in enumerate(columns):
            own = {name: sorted((r["workers"], r[key]) for r in rows if r["load"] == load) for name, rows in series.items()}
            sizes = sorted({workers for points in own.values() for workers, _ in points})
            most = max((value for points in own.values() for _, value in points), default=1.0)
            step = 10 ** math.floor(math.log10(most)) / 2
            most = math.ceil(most / step) * step
            x0, y0 = left + column * (wide + 30), top + row * (high + 50) + high
            steps = max(len(sizes) - 1, 1)

            def place(workers, value):
                return x0 + 8 + (wide - 16) * sizes.index(workers) / steps, y0 - high * value / most

            canvas.text(x0, y0 - high - 8, f"{title}, load {load}")
            ticks = round(most / step)
            for tick in range(0, ticks + 1, max(1, ticks // 5)):
                y = y0 - high * tick * step / most
                canvas.line([(x0, y), (x0 + wide, y)])
                canvas.text(x0 - 4, y + 4, f"{tick * step:g}", size=9, anchor="end")
            for workers in sizes:
                canvas.text(place(workers, 0)[0], y0 + 13, workers, size=9, anchor="middle")
            if row == len(panels) - 1:
                canvas.text(x0 + wide / 2, y0 + 27, "workers", size=10, anchor="middle")
            for at, points in enumerate(own.values()):
                placed = [place(*point) for point in points]
                canvas.line(placed, COLOURS[at % len(COLOURS)], 1.6)
                for point in placed:
                    canvas.dot(*point, COLOURS[at % len(COLOURS)])
    canvas.write(path)
