//! `strftime_now`, used by templates that give the model the date. Always UTC and English.

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

struct Moment {
    /// Seconds since 1970-01-01.
    seconds: u64,
    year: u64,
    month: u64,
    day: u64,
    hour: u64,
    minute: u64,
    second: u64,
    weekday: u64,
    /// From 1.
    year_day: u64,
}

impl Moment {
    fn of(time: SystemTime) -> Self {
        let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let (days, rest) = (seconds / 86400, seconds % 86400);
        let (year, month, day) = date(days);
        Self {
            seconds,
            year,
            month,
            day,
            hour: rest / 3600,
            minute: rest / 60 % 60,
            second: rest % 60,
            // 1970-01-01 was a Thursday.
            weekday: (days + 3) % 7,
            year_day: days - day_number(year, 1, 1) + 1,
        }
    }

    /// ISO 8601 year and week: a week belongs to the year of its Thursday.
    fn iso_week(&self) -> (u64, u64) {
        let thursday = self.seconds / 86400 + 3 - self.weekday;
        let year = date(thursday).0;
        (year, (thursday - day_number(year, 1, 1)) / 7 + 1)
    }

    /// A number of the date, its width and its fill character.
    fn number(&self, conversion: char) -> Option<(u64, usize, char)> {
        let twelve = if self.hour.is_multiple_of(12) { 12 } else { self.hour % 12 };
        Some(match conversion {
            'Y' => (self.year, 1, '0'),
            'C' => (self.year / 100, 2, '0'),
            'y' => (self.year % 100, 2, '0'),
            'm' => (self.month, 2, '0'),
            'd' => (self.day, 2, '0'),
            'e' => (self.day, 2, ' '),
            'j' => (self.year_day, 3, '0'),
            'H' => (self.hour, 2, '0'),
            'k' => (self.hour, 2, ' '),
            'I' => (twelve, 2, '0'),
            'l' => (twelve, 2, ' '),
            'M' => (self.minute, 2, '0'),
            'S' => (self.second, 2, '0'),
            'f' => (0, 6, '0'),
            's' => (self.seconds, 1, '0'),
            'u' => (self.weekday + 1, 1, '0'),
            'w' => ((self.weekday + 1) % 7, 1, '0'),
            'U' => ((self.year_day + 6 - (self.weekday + 1) % 7) / 7, 2, '0'),
            'W' => ((self.year_day + 6 - self.weekday) / 7, 2, '0'),
            'G' => (self.iso_week().0, 1, '0'),
            'g' => (self.iso_week().0 % 100, 2, '0'),
            'V' => (self.iso_week().1, 2, '0'),
            _ => return None,
        })
    }

    fn word(&self, conversion: char) -> Option<String> {
        let month = MONTHS.get(self.month as usize - 1).copied().unwrap_or_default();
        let day = DAYS.get(self.weekday as usize).copied().unwrap_or_default();
        let short = |name: &'static str| name.get(..3).unwrap_or(name);
        Some(match conversion {
            'B' => month.into(),
            'b' | 'h' => short(month).into(),
            'A' => day.into(),
            'a' => short(day).into(),
            'p' => if self.hour < 12 { "AM" } else { "PM" }.into(),
            'P' => if self.hour < 12 { "am" } else { "pm" }.into(),
            'F' => self.written("%Y-%m-%d"),
            'D' | 'x' => self.written("%m/%d/%y"),
            'T' | 'X' => self.written("%H:%M:%S"),
            'R' => self.written("%H:%M"),
            'r' => self.written("%I:%M:%S %p"),
            'c' => self.written("%a %b %e %H:%M:%S %Y"),
            'Z' => "UTC".into(),
            'z' => "+0000".into(),
            'n' => "\n".into(),
            't' => "\t".into(),
            '%' => "%".into(),
            _ => return None,
        })
    }

    fn written(&self, format: &str) -> String {
        let mut text = String::new();
        let mut rest = format;
        while let Some((plain, after)) = rest.split_once('%') {
            text.push_str(plain);
            let flag = after.chars().next().filter(|flag| matches!(flag, '-' | '_' | '0' | '^'));
            let conversion = after.get(flag.map_or(0, char::len_utf8)..).unwrap_or_default();
            let Some(kind) = conversion.chars().next() else {
                rest = after;
                text.push('%');
                continue;
            };
            rest = conversion.get(kind.len_utf8()..).unwrap_or_default();
            if let Some((number, width, fill)) = self.number(kind) {
                let number = number.to_string();
                let (width, fill) = match flag {
                    Some('-') => (1, fill),
                    Some('_') => (width, ' '),
                    Some('0') => (width, '0'),
                    _ => (width, fill),
                };
                text.extend(std::iter::repeat_n(fill, width.saturating_sub(number.len())));
                text.push_str(&number);
            } else if let Some(word) = self.word(kind) {
                text.push_str(&if flag == Some('^') { word.to_uppercase() } else { word });
            } else {
                text.push('%');
                text.extend(flag);
                text.push(kind);
            }
        }
        text.push_str(rest);
        text
    }
}

/// Formats a time with C's conversions; unknown ones stay unchanged.
pub(super) fn format(format: &str, now: SystemTime) -> String {
    Moment::of(now).written(format)
}

/// Year, month and day of the day that is `days` after 1970-01-01.
fn date(days: u64) -> (u64, u64, u64) {
    // Counted from 0000-03-01, so that the leap day is the last day of a year. 400 years have 146097 days.
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
