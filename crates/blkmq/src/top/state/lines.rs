//! The lines that are shown: those of the tree that are open, pass the filter, and are not idle if idle ones
//! are hidden; sorted among their siblings, or all groups together.

use std::cmp::Ordering;
use std::sync::Arc;

use super::{Fold, Line, Shape, Sort, State, order};
use crate::top::tree::{Key, Node, Row};

impl State {
    /// Makes the lines anew after a change. The selected line stays selected, if it still exists.
    pub(in crate::top) fn arrange(&mut self) {
        let at = self.selected_line();
        let tree = std::mem::take(&mut self.tree);
        let mut lines = Vec::new();
        match self.shape {
            Shape::Tree => self.add_tree(&tree, 0, &mut lines),
            Shape::List => {
                let several = tree.len() > 1;
                add_groups(&tree, several, &mut lines);
                lines.retain(|line| self.shows(&line.row));
                lines.sort_by(|one, other| self.compare(&one.row, &other.row));
            }
        }
        self.tree = tree;
        self.lines = lines;
        if self.selected.is_some() && self.selected_line().is_none() {
            let near = at.unwrap_or(0).min(self.lines.len().saturating_sub(1));
            self.selected = self.lines.get(near).map(|line| line.row.key.clone());
        }
    }

    fn add_tree(&self, nodes: &[Arc<Node>], depth: usize, lines: &mut Vec<Line>) {
        let mut shown: Vec<&Arc<Node>> = nodes.iter().filter(|node| self.shows_any(node)).collect();
        shown.sort_by(|one, other| self.compare(&one.row, &other.row));
        for node in shown {
            let fold = match node.children.is_empty() {
                true => Fold::Leaf,
                false if self.is_open(node) => Fold::Open,
                false => Fold::Closed,
            };
            let row = Arc::clone(&node.row);
            lines.push(Line { row, depth, fold });
            if fold == Fold::Open {
                self.add_tree(&node.children, depth + 1, lines);
            }
        }
    }

    /// Groups with only disks are closed by default: they would double the lines, and disks have no
    /// counts.
    fn is_open(&self, node: &Node) -> bool {
        let is_disk = |child: &Arc<Node>| matches!(child.row.key, Key::Disk(_));
        let is_by_default = !node.children.iter().all(is_disk)
            || !self.filter.is_empty() && node.children.iter().any(|child| self.shows(&child.row));
        is_by_default != self.toggled.contains(&node.row.key)
    }

    fn shows_any(&self, node: &Node) -> bool {
        self.shows(&node.row) || node.children.iter().any(|child| self.shows_any(child))
    }

    fn shows(&self, row: &Row) -> bool {
        let is_idle = |row: &Row| match &row.numbers {
            Some(numbers) => numbers.iops == 0.0 && numbers.queued == 0,
            // A disk is shown with its group.
            None => true,
        };
        (!self.hides_idle || !is_idle(row)) && has(row, &self.filter)
    }

    fn compare(&self, one: &Row, other: &Row) -> Ordering {
        let ordering = match self.sort {
            Sort::Name => Ordering::Equal,
            Sort::Column(column) => order(other, column).total_cmp(&order(one, column)),
        };
        let ordering = ordering.then_with(|| one.key.cmp(&other.key));
        if self.is_reversed {
            ordering.reverse()
        } else {
            ordering
        }
    }
}

/// Whether the name of a line contains a text, ignoring case.
pub(super) fn has(row: &Row, text: &str) -> bool {
    let name = match &row.key {
        Key::Group(_, path) => path,
        Key::Queue(_) | Key::Disk(_) => &row.name,
    };
    name.to_lowercase().contains(&text.to_lowercase())
}

fn add_groups(nodes: &[Arc<Node>], several: bool, lines: &mut Vec<Line>) {
    for node in nodes {
        if let Key::Group(queue, path) = &node.row.key {
            let name = match several {
                true => format!("{queue}:{path}"),
                false => path.clone(),
            };
            let row = Arc::new(Row {
                name,
                ..(*node.row).clone()
            });
            let (depth, fold) = (0, Fold::Leaf);
            lines.push(Line { row, depth, fold });
        }
        add_groups(&node.children, several, lines);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{example, names};
    use super::*;

    #[test]
    fn neighbours_are_sorted_and_stay_below_their_parents() {
        let mut state = example();
        assert_eq!(names(&state), ["q (bfq)", "c", "a", "b", "idle"]);
        state.is_reversed = true;
        state.arrange();
        assert_eq!(names(&state), ["q (bfq)", "idle", "c", "b", "a"]);
        state.shape = Shape::List;
        state.is_reversed = false;
        state.arrange();
        assert_eq!(names(&state), ["/c", "/c/a", "/c/b", "/idle"]);
    }

    #[test]
    fn filter_keeps_what_has_it_and_what_that_is_part_of() {
        let mut state = example();
        state.filter = "C/B".to_owned();
        state.arrange();
        assert_eq!(names(&state), ["q (bfq)", "c", "b"]);
        state.filter = "vm3".to_owned();
        state.arrange();
        assert_eq!(names(&state), ["q (bfq)", "idle", "vm3"]);
    }

    #[test]
    fn idle_groups_can_be_hidden() {
        let mut state = example();
        state.hides_idle = true;
        state.arrange();
        assert_eq!(names(&state), ["q (bfq)", "c", "a", "b"]);
    }

    #[test]
    fn selected_line_stays_selected_where_it_goes() {
        let mut state = example();
        state.go(3);
        let selected = state.selected.clone();
        state.sort = Sort::Name;
        state.is_reversed = true;
        state.arrange();
        assert_eq!(
            (names(&state)[state.selected_line().unwrap()], selected),
            ("b", state.selected.clone())
        );
        state.filter = "idle".to_owned();
        state.arrange();
        assert_eq!(names(&state)[state.selected_line().unwrap()], "idle");
    }
}
