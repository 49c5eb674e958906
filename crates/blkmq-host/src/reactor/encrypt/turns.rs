//! Whose slice is next: bios that wait to be encrypted or decrypted, a line for each group. The lines take
//! turns, and so do the bios of one line.

use std::collections::VecDeque;

use blkmq_core::ids::GroupId;

/// The lines of waiting bios.
#[derive(Default)]
pub(super) struct Turns {
    /// Lines with somebody in them, the next one first.
    lines: VecDeque<(GroupId, VecDeque<u32>)>,
    /// Empty lines, kept for their memory.
    spare: Vec<VecDeque<u32>>,
    line_max: usize,
}

impl Turns {
    /// Takes memory for as many bios as can wait.
    pub(super) fn reserve(&mut self, bios: usize) {
        self.line_max = bios;
        self.lines.reserve(LINES);
        self.spare.resize_with(LINES, || VecDeque::with_capacity(bios));
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// Puts a bio at the end of its group's line.
    pub(super) fn push(&mut self, number: u32, group: GroupId) {
        if let Some((_, line)) = self.lines.iter_mut().find(|(of, _)| *of == group) {
            return line.push_back(number);
        }
        let spare = self.spare.pop();
        let mut line = spare.unwrap_or_else(|| VecDeque::with_capacity(self.line_max));
        line.push_back(number);
        self.lines.push_back((group, line));
    }

    /// Takes the first bio of the next line. The line is then behind the others.
    pub(super) fn next(&mut self) -> Option<u32> {
        let (group, mut line) = self.lines.pop_front()?;
        let number = line.pop_front();
        match line.is_empty() {
            true => self.spare.push(line),
            false => self.lines.push_back((group, line)),
        }
        number
    }
}

/// Groups that wait at the same time before memory is taken for one more line.
const LINES: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_take_turns_whatever_each_has_in_its_line() {
        let mut turns = Turns::default();
        (0..3).for_each(|number| turns.push(number, GroupId(1)));
        turns.push(10, GroupId(2));
        let order: Vec<u32> = std::iter::from_fn(|| turns.next()).collect();
        assert_eq!(order, [0, 10, 1, 2]);
        assert!(turns.is_empty());
    }
}
