//! Axes: where ticks stand, and what is written at them.

use crate::metrics::thousands;

use super::series::padded;

/// How values lie along an axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Scale {
    Linear,
    /// To base 10. Values that have no logarithm lie at the lower end.
    Log,
}

/// An axis from its lower to its upper end, `low < high`.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    scale: Scale,
    low: f64,
    high: f64,
    /// Values and what is written at them.
    pub ticks: Vec<(f64, String)>,
}

impl Axis {
    /// About `count` ticks at 1, 2 or 5 times a power of ten.
    pub(super) fn linear(low: f64, high: f64, count: usize) -> Self {
        Self::with_ticks(low, high, step((high - low) / count as f64))
    }

    /// As [`linear`](Self::linear) for whole numbers, which may be the same one.
    pub(super) fn steps(low: f64, high: f64, count: usize) -> Self {
        let (low, high) = if high - low >= 1.0 { (low, high) } else { padded((low, low), 0.0) };
        Self::with_ticks(low, high, step((high - low) / count as f64).max(1.0))
    }

    /// Linear, with a tick at each multiple of `step`.
    fn with_ticks(low: f64, high: f64, step: f64) -> Self {
        let ticks = multiples(low, high, step).map(|value| (value, label(value, low.abs().max(high.abs()), step)));
        Self { scale: Scale::Linear, low, high, ticks: ticks.collect() }
    }

    /// From a tick below `low` to one above `high`, both positive: powers of ten, and 2 and 5 times these if there is room.
    pub(super) fn log(low: f64, high: f64) -> Self {
        let within = |mantissas: &[f64]| {
            let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
            let all: Vec<_> = (first - 1..=last + 1)
                .flat_map(|power| mantissas.iter().map(move |mantissa| mantissa * 10_f64.powi(power)))
                .collect();
            let from = all.iter().rposition(|tick| *tick < low).unwrap_or(0);
            let to = all.iter().position(|tick| *tick > high).unwrap_or(all.len() - 1);
            all[from..=to].to_vec()
        };
        let mut ticks = within(&[1.0, 2.0, 5.0]);
        if ticks.len() > 7 {
            ticks = within(&[1.0]);
        }
        let every = ticks.len().div_ceil(8);
        let (low, high) = (ticks[0], ticks[ticks.len() - 1]);
        let ticks = ticks.into_iter().step_by(every).map(|tick| (tick, label(tick, tick, tick)));
        Self { scale: Scale::Log, low, high, ticks: ticks.collect() }
    }

    /// From 0 at the lower end to 1 at the upper; what lies beyond lies at the end.
    pub(super) fn share(&self, value: f64) -> f64 {
        let share = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log if value > 0.0 => (value / self.low).log10() / (self.high / self.low).log10(),
            Scale::Log => 0.0,
        };
        share.clamp(0.0, 1.0)
    }

    pub(super) fn ends(&self) -> (f64, f64) {
        (self.low, self.high)
    }
}

/// 1, 2 or 5 times a power of ten, and at least 0.7 of `wanted`.
fn step(wanted: f64) -> f64 {
    let power = 10_f64.powf(wanted.log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|times| times * power).into_iter().find(|step| *step >= 0.7 * wanted).unwrap_or(wanted)
}

fn multiples(low: f64, high: f64, step: f64) -> impl Iterator<Item = f64> {
    // The end itself may be one, which rounding must not lose.
    let (first, last) = ((low / step - 1e-9).ceil(), (high / step + 1e-9).floor());
    // `+ 0.0` since -0 is printed with its sign.
    (0..100).map(move |i| first + f64::from(i)).take_while(move |n| *n <= last).map(move |n| n * step + 0.0)
}

/// `value` with as many digits as tell it from its neighbours, which are `step` away, on an axis of values up to `size`.
fn label(value: f64, size: f64, step: f64) -> String {
    if value == 0.0 {
        return "0".into();
    }
    let power = |number: f64| number.log10().floor() as i32;
    if (1e-3..1e7).contains(&size) {
        return thousands(&format!("{value:.*}", (-power(step)).clamp(0, 9) as usize));
    }
    format!("{value:.*e}", (power(value.abs()) - power(step)).clamp(0, 9) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis) -> Vec<&str> {
        axis.ticks.iter().map(|tick| tick.1.as_str()).collect()
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(labels(&Axis::linear(2.13, 3.47, 6)), ["2.2", "2.4", "2.6", "2.8", "3.0", "3.2", "3.4"].as_slice());
        assert_eq!(labels(&Axis::linear(-0.1, 0.11, 4)), ["-0.10", "-0.05", "0", "0.05", "0.10"].as_slice());
        assert_eq!(labels(&Axis::linear(0.0, 3e-4, 3)), ["0", "1e-4", "2e-4", "3e-4"].as_slice());
        assert_eq!(labels(&Axis::steps(7.0, 7.0, 8)), ["7"].as_slice());
        assert_eq!(labels(&Axis::steps(0.0, 20_000.0, 4)), ["0", "5,000", "10,000", "15,000", "20,000"].as_slice());
        assert_eq!(labels(&Axis::log(0.3, 5.0)), ["0.2", "0.5", "1", "2", "5", "10"].as_slice());
        assert_eq!(labels(&Axis::log(1.0, 1.0)), ["0.5", "1", "2"].as_slice());
        assert_eq!(labels(&Axis::log(3e-4, 2e3)), ["1e-4", "0.01", "1", "100", "10,000"].as_slice());
    }

    #[test]
    fn strange_ends() {
        let ends = [0.0, 1.0, 1e-30, 1e30, usize::MAX as f64, 0.1 + 0.2];
        for low in ends {
            for high in ends.into_iter().filter(|high| *high >= low) {
                let (from, to) = padded((low, high), 0.05);
                let mut axes = vec![Axis::linear(from, to, 6)];
                axes.extend([low, high].iter().all(|end| end.fract() == 0.0).then(|| Axis::steps(low, high, 8)));
                for axis in axes {
                    let (from, to) = axis.ends();
                    assert!(from < to && from <= low && high <= to, "{axis:?}");
                    assert!((1..15).contains(&axis.ticks.len()), "{axis:?}");
                    assert!([low, high].map(|value| axis.share(value)).iter().all(|share| share.is_finite()));
                }
                let log = Axis::log(low.max(high * 1e-8).max(1e-38), high.max(1e-38));
                assert!((2..=8).contains(&log.ticks.len()), "{log:?}");
            }
        }
    }
}
