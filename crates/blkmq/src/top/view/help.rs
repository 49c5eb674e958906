//! The help text: what keys do, and the columns on the screen.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Modifier, Style};

use super::{Column, put, row_of};

/// Draws the help.
pub(super) fn draw(buffer: &mut Buffer, area: Rect, columns: &[&Column]) {
    let columns = columns.iter().map(|column| (column.title, column.help));
    let all = KEYS.iter().copied().chain([("", "")]).chain(columns);
    for (number, (what, help)) in all.enumerate().take(usize::from(area.height).saturating_sub(1)) {
        let row = row_of(area, number);
        put(buffer, row, what, Style::new().add_modifier(Modifier::BOLD));
        let right = Rect {
            x: row.x + LEFT.min(row.width),
            width: row.width.saturating_sub(LEFT),
            ..row
        };
        put(buffer, right, help, Style::new());
    }
}

/// What keys do.
const KEYS: [(&str, &str); 12] = [
    ("arrows, PgUp, PgDn", "go up and down; so do k and j"),
    ("Home, End", "the first line, the last one"),
    ("F3 /", "search; F3 again, or n afterwards, for the next"),
    ("F4 \\", "show only what has a text in its name; Esc clears it"),
    ("F5 t Tab", "groups as a tree, or all in one list"),
    ("F6 > <", "sort by the next column, by the one before"),
    ("I", "turn the order round"),
    ("i", "hide what is idle"),
    ("Space + -", "fold, or open, what is below a line"),
    ("z p", "freeze the screen; again to let it go on"),
    ("F1 ? h", "this"),
    ("F10 q Ctrl-C", "quit"),
];
const LEFT: u16 = 20;
