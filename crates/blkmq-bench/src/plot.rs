//! Curves in a picture: panels below each other, each with its axes and one line for each curve. The caller
//! transforms values to the axes, for example by taking logarithms.

use std::fmt::Write;

use crate::svg::{colour, rect, text};

/// One pair of axes with its curves.
pub(crate) struct Panel {
    pub(crate) title: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) curves: Vec<Curve>,
}

/// The range of an axis, and its labels.
pub(crate) struct Axis {
    pub(crate) low: f64,
    pub(crate) high: f64,
    pub(crate) ticks: Vec<(f64, String)>,
}

/// A line through points.
pub(crate) struct Curve {
    /// Shown once in the legend, with its colour, unless it is empty.
    pub(crate) name: String,
    pub(crate) colour: usize,
    pub(crate) is_dashed: bool,
    pub(crate) points: Vec<(f64, f64)>,
}

impl Axis {
    /// The position of a value on the axis, from 0 to 1.
    fn part(&self, value: f64) -> f64 {
        ((value - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }
}

/// Draws panels below each other.
pub(crate) fn draw(title: &str, panels: &[Panel]) -> String {
    let height = TOP + panels.len() * (PANEL + GAP) + BOTTOM;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"system-ui, sans-serif\" font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n"
    );
    text(&mut svg, 20, 26, "#111", "start", 16, title);
    for (index, panel) in panels.iter().enumerate() {
        panel.draw(&mut svg, TOP + index * (PANEL + GAP));
    }
    svg + "</svg>\n"
}

impl Panel {
    fn draw(&self, svg: &mut String, top: usize) {
        text(svg, LEFT, top - 8, "#333", "start", 12, &self.title);
        self.draw_axes(svg, top);
        let mut named = 0;
        for curve in &self.curves {
            let points = curve.points.iter().map(|point| self.place(*point, top));
            let points: Vec<String> = points.map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let dashes = if curve.is_dashed {
                " stroke-dasharray=\"5 4\""
            } else {
                ""
            };
            let _ = writeln!(
                svg,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"{dashes}/>",
                points.join(" "),
                colour(curve.colour)
            );
            if !curve.name.is_empty() {
                let y = top + 6 + 18 * named;
                rect(
                    svg,
                    (LEFT + ACROSS + 16) as f64,
                    y as f64,
                    12.0,
                    12.0,
                    colour(curve.colour),
                );
                text(svg, LEFT + ACROSS + 34, y + 10, "#333", "start", 12, &curve.name);
                named += 1;
            }
        }
    }

    /// Grid lines with their labels.
    fn draw_axes(&self, svg: &mut String, top: usize) {
        for (value, name) in &self.x.ticks {
            let (x, _) = self.place((*value, self.y.low), top);
            line(svg, (x, top as f64), (x, (top + PANEL) as f64));
            text(svg, x as usize, top + PANEL + 15, "#555", "middle", 11, name);
        }
        for (value, name) in &self.y.ticks {
            let (_, y) = self.place((self.x.low, *value), top);
            line(svg, (LEFT as f64, y), ((LEFT + ACROSS) as f64, y));
            text(svg, LEFT - 8, y as usize + 4, "#555", "end", 11, name);
        }
    }

    fn place(&self, (x, y): (f64, f64), top: usize) -> (f64, f64) {
        (
            LEFT as f64 + self.x.part(x) * ACROSS as f64,
            (top + PANEL) as f64 - self.y.part(y) * PANEL as f64,
        )
    }
}

fn line(svg: &mut String, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
    let _ = writeln!(
        svg,
        "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"#ddd\"/>"
    );
}

const WIDTH: usize = 860;
const LEFT: usize = 80;
const ACROSS: usize = 620;
const TOP: usize = 60;
const PANEL: usize = 220;
const GAP: usize = 50;
const BOTTOM: usize = 0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_lie_where_the_axes_say() {
        let axis = |low, high| Axis {
            low,
            high,
            ticks: vec![(low, "a<b".to_owned())],
        };
        let panel = Panel {
            title: String::new(),
            x: axis(0.0, 10.0),
            y: axis(1.0, 3.0),
            curves: vec![Curve {
                name: "one".to_owned(),
                colour: 0,
                is_dashed: true,
                points: vec![(0.0, 1.0), (5.0, 2.0), (20.0, 9.0)],
            }],
        };
        let svg = draw("t", &[panel]);
        // The ends, the middle, and values beyond the axes, which are drawn at the ends.
        assert!(
            svg.contains("points=\"80.0,280.0 390.0,170.0 700.0,60.0\""),
            "{svg}"
        );
        assert!(svg.contains("a&lt;b") && svg.contains(">one<"));
    }
}
