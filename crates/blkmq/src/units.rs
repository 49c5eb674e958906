//! Numbers for people: sizes, times and counts with the unit that leaves three digits or fewer.

/// Bytes, in powers of 1024.
pub(crate) fn size(bytes: f64) -> String {
    scaled(bytes, 1024.0, &["B", "K", "M", "G", "T"])
}

/// Nanoseconds; beyond the histogram's range, `>1h`.
pub(crate) fn time(ns: u64) -> String {
    match ns {
        // The bound of a histogram's last bucket.
        u64::MAX => ">1h".to_owned(),
        ns => scaled(ns as f64, 1000.0, &["ns", "us", "ms", "s"]),
    }
}

/// A count, or a rate per second; below ten, with one decimal, if it is not whole.
#[cfg(feature = "top")]
pub(crate) fn count(count: f64) -> String {
    match count {
        small if small < 9.95 && small.fract() >= 0.05 => format!("{small:.1}"),
        count if count < 9999.5 => format!("{count:.0}"),
        count => scaled(count, 1000.0, &["", "k", "M", "G"]),
    }
}

fn scaled(value: f64, step: f64, units: &[&str]) -> String {
    let (mut value, mut at) = (value, 0);
    while value >= step && at + 1 < units.len() {
        value /= step;
        at += 1;
    }
    match value {
        whole if at == 0 || whole >= 100.0 => format!("{whole:.0}{}", units[at]),
        value => format!("{value:.1}{}", units[at]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_has_the_unit_that_leaves_three_digits() {
        assert_eq!(
            [0.0, 512.0, 1536.0, 3e9].map(size),
            ["0B", "512B", "1.5K", "2.8G"]
        );
        assert_eq!(
            [7, 1500, 250_000_000, u64::MAX].map(time),
            ["7ns", "1.5us", "250ms", ">1h"]
        );
    }

    #[cfg(feature = "top")]
    #[test]
    fn counts_are_whole_where_they_can_be() {
        let shown = [0.0, 0.4, 3.0, 9.96, 9999.0, 12_345.0, 2e6].map(count);
        assert_eq!(shown, ["0", "0.4", "3", "10", "9999", "12.3k", "2.0M"]);
    }
}
