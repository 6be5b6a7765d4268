//! `strftime_now`: some templates tell the model the date. Always UTC and in English.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

/// `format` with C's conversions filled in; one that is not known stays as it is.
pub(super) fn format(format: &str, now: SystemTime) -> String {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, time) = (seconds / 86400, seconds % 86400);
    let (year, month, day) = date(days);
    let (hour, minute, second) = (time / 3600, time / 60 % 60, time % 60);
    // 1970-01-01 was a Thursday.
    let weekday = (days + 3) % 7;
    let month_name = MONTHS.get(month as usize - 1).copied().unwrap_or_default();
    let day_name = DAYS.get(weekday as usize).copied().unwrap_or_default();
    let short = |name: &'static str| name.get(..3).unwrap_or(name);
    let year_day = days - day_number(year, 1, 1) + 1;
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        let twelve = if hour % 12 == 0 { 12 } else { hour % 12 };
        let written = match chars.next() {
            Some('Y') => write!(text, "{year}"),
            Some('y') => write!(text, "{:02}", year % 100),
            Some('m') => write!(text, "{month:02}"),
            Some('d') => write!(text, "{day:02}"),
            Some('e') => write!(text, "{day:2}"),
            Some('j') => write!(text, "{year_day:03}"),
            Some('B') => write!(text, "{month_name}"),
            Some('b' | 'h') => write!(text, "{}", short(month_name)),
            Some('A') => write!(text, "{day_name}"),
            Some('a') => write!(text, "{}", short(day_name)),
            Some('H') => write!(text, "{hour:02}"),
            Some('I') => write!(text, "{twelve:02}"),
            Some('p') => write!(text, "{}", if hour < 12 { "AM" } else { "PM" }),
            Some('M') => write!(text, "{minute:02}"),
            Some('S') => write!(text, "{second:02}"),
            Some('F') => write!(text, "{year}-{month:02}-{day:02}"),
            Some('T') => write!(text, "{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => write!(text, "UTC"),
            Some('z') => write!(text, "+0000"),
            Some('%') => write!(text, "%"),
            Some(other) => write!(text, "%{other}"),
            None => write!(text, "%"),
        };
        debug_assert!(written.is_ok(), "a String takes every text");
    }
    text
}

/// Year, month and day of the day that is `days` after 1970-01-01.
fn date(days: u64) -> (u64, u64, u64) {
    // Counted from 0000-03-01, so that the leap day is a year's last: 146097 days in 400 years.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

/// Days from 1970-01-01 to a later date.
fn day_number(year: u64, month: u64, day: u64) -> u64 {
    let year = year - u64::from(month <= 2);
    let (era, of_era) = (year / 400, year % 400);
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn known_moments_are_written_as_python_writes_them() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let all = "%Y-%m-%d %H:%M:%S %a %A %b %B %j %y %I %p %e %% %q";
        assert_eq!(format(all, at(0)), "1970-01-01 00:00:00 Thu Thursday Jan January 001 70 12 AM  1 % %q");
        assert_eq!(
            format(all, at(1_709_251_199)),
            "2024-02-29 23:59:59 Thu Thursday Feb February 060 24 11 PM 29 % %q"
        );
        assert_eq!(format("%d %b %Y, %F %T", at(4_102_444_800)), "01 Jan 2100, 2100-01-01 00:00:00");
        assert_eq!(format("%", at(0)), "%");
    }

    #[test]
    fn dates_and_day_numbers_are_inverse() {
        for days in (0..80_000).step_by(7) {
            let (year, month, day) = date(days);
            assert_eq!(day_number(year, month, day), days);
        }
    }
}
