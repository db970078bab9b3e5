//! Sizes as people write and read them. A unit is always named: GiB is not GB.

use std::fmt;
use std::str::FromStr;

/// Bytes, printed with a binary unit: `86.7 MiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Human(pub u64);

const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

impl fmt::Display for Human {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < 1024 {
            return write!(f, "{} B", self.0);
        }
        let mut value = self.0 as f64 / 1024.0;
        let mut unit = 0;
        // 1023.95 would be printed as 1024.0 of the smaller unit.
        while value >= 1023.95 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        write!(f, "{value:.1} {}", UNITS[unit])
    }
}

/// A size on the command line: bytes, or a share of something.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Amount {
    Bytes(u64),
    /// 0 to 100.
    Percent(f64),
}

impl Amount {
    /// The bytes that this is of `total`.
    pub fn of(self, total: u64) -> u64 {
        match self {
            Amount::Bytes(bytes) => bytes,
            Amount::Percent(percent) => (total as f64 * percent / 100.0) as u64,
        }
    }
}

impl fmt::Display for Amount {
    /// As it can be parsed again.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Amount::Bytes(bytes) => write!(f, "{bytes}"),
            Amount::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

impl FromStr for Amount {
    type Err = String;

    fn from_str(text: &str) -> Result<Amount, String> {
        let wrong = || {
            format!(
                "\"{text}\" is no size: write bytes, or a number with KiB, MiB, GiB, TiB (or KB, MB, GB, TB), or a percentage like 50%"
            )
        };
        let text = text.trim();
        let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let number: f64 = text[..digits].parse().map_err(|_| wrong())?;
        let unit = text[digits..].trim();
        if unit == "%" {
            let all = || format!("\"{text}\" is more than all of it: at most 100%");
            return if number <= 100.0 { Ok(Amount::Percent(number)) } else { Err(all()) };
        }
        let power = |base: f64, exponent: i32| base.powi(exponent);
        let factor = match unit.to_ascii_lowercase().as_str() {
            "" | "b" => 1.0,
            "k" | "kib" => power(1024.0, 1),
            "m" | "mib" => power(1024.0, 2),
            "g" | "gib" => power(1024.0, 3),
            "t" | "tib" => power(1024.0, 4),
            "kb" => power(1000.0, 1),
            "mb" => power(1000.0, 2),
            "gb" => power(1000.0, 3),
            "tb" => power(1000.0, 4),
            _ => return Err(wrong()),
        };
        let bytes = number * factor;
        if bytes < u64::MAX as f64 { Ok(Amount::Bytes(bytes as u64)) } else { Err(wrong()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_printed_with_their_unit() {
        for (text, bytes) in [("0", 0), ("4096", 4096), ("16KiB", 16384), ("1.5G", 3 << 29), ("2 GB", 2_000_000_000)] {
            assert_eq!(text.parse::<Amount>(), Ok(Amount::Bytes(bytes)), "{text}");
        }
        assert_eq!("50%".parse::<Amount>().map(|a| a.of(1000)), Ok(500));
        for text in ["", "-1", "12 apples", "101%", "1e30TiB"] {
            text.parse::<Amount>().expect_err(text);
        }
        assert_eq!(Human(1023).to_string(), "1023 B");
        assert_eq!(Human(90_868_376).to_string(), "86.7 MiB");
        assert_eq!(Human((1 << 30) - 1).to_string(), "1.0 GiB");
    }
}
