//! Counts in messages: `1 disk`, `2 disks`.

/// A count with what is counted, as one or as more are called.
pub fn counted(count: usize, one: &str, more: &str) -> String {
    match count {
        1 => format!("1 {one}"),
        count => format!("{count} {more}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_called_as_one_and_any_other_number_as_more() {
        let disks = |count| counted(count, "disk", "disks");
        assert_eq!([0, 1, 2].map(disks), ["0 disks", "1 disk", "2 disks"]);
    }
}
