//! Smoothing, thinning and ranges of values over steps.

/// A step and its value; NaN if the value cannot be drawn.
pub(super) type Point = (usize, f64);

/// Maximum number of points drawn per curve.
pub(super) const MAX_POINTS: usize = 2000;
/// Two points per bin, in addition to the first and the last point.
pub(super) const BINS: usize = (MAX_POINTS - 2) / 2;
/// Maximum weight of the previous mean.
const MAX_SMOOTHING: f64 = 0.9;

/// `value`, or NaN if it is not finite or so large that its axis would overflow.
pub(super) fn drawable(value: f64) -> f64 {
    if value.abs() <= 1e30 { value } else { f64::NAN }
}

/// Runs with fewer points are not smoothed.
const FEW: usize = 100;

/// Smoothing weight `w` for runs of at most `n` points: `1 - 15 / n`. Thus the mean lags
/// `w / (1 - w)` points behind, a fifteenth of the run; 0 for short runs. Rounded to hundredths,
/// because the picture shows it.
pub(super) fn smoothing(n: usize) -> f64 {
    if n < FEW {
        return 0.0;
    }
    let weight = 1.0 - 15.0 / n as f64;
    (weight.min(MAX_SMOOTHING) * 100.0).round() / 100.0
}

/// Exponential moving average `m = w m + (1 - w) value` from 0, divided by `1 - w^n` to remove the
/// initial bias. NaN values stay in place and do not enter the mean.
pub(super) fn smoothed(points: &[Point], smoothing: f64) -> Vec<Point> {
    let (mut mean, mut weight) = (0.0, 0.0);
    let next = |&(step, value): &Point| {
        if value.is_nan() {
            return (step, value);
        }
        mean = smoothing * mean + (1.0 - smoothing) * value;
        weight = smoothing * weight + (1.0 - smoothing);
        (step, mean / weight)
    };
    points.iter().map(next).collect()
}

/// At most [`MAX_POINTS`] points: the smallest and the largest of each bin, in the order of their
/// steps. A NaN splits a line.
pub(super) fn thinned(points: &[Point]) -> Vec<Point> {
    let [first, inner @ .., last] = points else { return points.to_vec() };
    if points.len() <= MAX_POINTS {
        return points.to_vec();
    }
    let mut thinned = vec![*first];
    for bin in inner.chunks(inner.len().div_ceil(BINS)) {
        let numbers = || bin.iter().enumerate().filter(|(_, (_, value))| !value.is_nan());
        let by_value = |a: &(usize, &Point), b: &(usize, &Point)| a.1.1.total_cmp(&b.1.1);
        if let (Some((low, _)), Some((high, _))) = (numbers().min_by(by_value), numbers().max_by(by_value)) {
            thinned.push(bin[low.min(high)]);
            if low != high {
                thinned.push(bin[low.max(high)]);
            }
        }
        thinned.extend(bin.iter().find(|(_, value)| value.is_nan()));
    }
    thinned.push(*last);
    thinned
}

/// Smallest value that at least a fraction `q` of the values does not exceed; `None` if there are
/// none.
pub(super) fn quantile(values: impl IntoIterator<Item = f64>, q: f64) -> Option<f64> {
    let mut values: Vec<_> = values.into_iter().filter(|value| !value.is_nan()).collect();
    values.sort_by(f64::total_cmp);
    let index = (q * values.len() as f64).ceil() as usize;
    values.get(index.saturating_sub(1)).copied()
}

/// A curve with at least this number of points may have a few beyond the axis.
pub(super) const MANY: usize = 50;

/// Axis range that shows most of every curve. A short curve is shown completely. Otherwise the
/// range extends from the median twice as far as the 0.05 and 0.85 quantiles, so that the first
/// steps do not dominate. A run far above the median run, such as a diverged one, does not set the
/// upper end.
pub(super) fn usual_range<'a>(runs: impl IntoIterator<Item = &'a [Point]>) -> Option<(f64, f64)> {
    let of_run = |points: &'a [Point]| {
        let [least, low, middle, high, most] =
            [0.0, 0.05, 0.5, 0.85, 1.0].map(|q| quantile(points.iter().map(|point| point.1), q));
        let middle = middle?;
        if points.len() < MANY {
            return Some((least?, most?));
        }
        Some(((2.0 * low? - middle).max(least?), (2.0 * high? - middle).min(most?)))
    };
    let (lows, mut highs): (Vec<_>, Vec<_>) = runs.into_iter().filter_map(of_run).unzip();
    highs.sort_by(f64::total_cmp);
    let low = lows.into_iter().min_by(f64::total_cmp)?;
    let middle = highs[(highs.len() - 1) / 2];
    let limit = low + (1.5 * (middle - low)).max(1.0 + low.abs());
    let high = highs.into_iter().rfind(|high| *high <= limit).unwrap_or(middle);
    Some((low, high))
}

/// Pads `low..high`, also if both are equal.
pub(super) fn padded((low, high): (f64, f64), share: f64) -> (f64, f64) {
    let size = low.abs().max(high.abs());
    let space = match high - low > 1e-6 * size {
        true => share * (high - low),
        false if size > 0.0 => 0.05 * size,
        false => 0.5,
    };
    (low - space, high + space)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_is_of_the_numbers_so_far() {
        let of = |values: &[f64]| -> Vec<_> {
            let points: Vec<_> = values.iter().map(|value| (1, *value)).collect();
            smoothed(&points, 0.9).into_iter().map(|point| point.1).collect()
        };
        assert!(of(&[3.0; 40]).iter().all(|mean| (mean - 3.0).abs() < 1e-12));
        // (0.9 * 0.1 * 2 + 0.1 * 4) / (1 - 0.9^2)
        let means = of(&[2.0, f64::NAN, 4.0]);
        assert!(means[1].is_nan() && (means[2] - 0.58 / 0.19).abs() < 1e-12, "{means:?}");
        assert_eq!([0, 99, 100, 150, 50_000].map(smoothing), [0.0, 0.0, 0.85, 0.9, 0.9]);
    }

    #[test]
    fn thinning_keeps_ends_spikes_and_gaps() {
        let n = 123_457;
        let mut points: Vec<_> = (0..n).map(|i| (i, (i % 7) as f64)).collect();
        points[60_001].1 = 99.0;
        points[60_002].1 = -99.0;
        points[90_000].1 = f64::NAN;
        let thin = thinned(&points);
        let numbers = thin.iter().filter(|point| !point.1.is_nan()).count();
        assert!((MAX_POINTS / 2..=MAX_POINTS).contains(&numbers), "{numbers}");
        for kept in [points[0], points[n - 1], (60_001, 99.0), (60_002, -99.0)] {
            assert!(thin.contains(&kept), "{kept:?}");
        }
        assert!(thin.iter().any(|point| point.1.is_nan()));
        let steps: Vec<_> = thin.iter().filter(|point| !point.1.is_nan()).map(|point| point.0).collect();
        assert!(steps.is_sorted());
        assert_eq!(thinned(&points[..MAX_POINTS]), points[..MAX_POINTS]);
    }

    #[test]
    fn neither_the_first_steps_nor_a_diverged_run_decide_the_range() {
        let run = |end: f64| -> Vec<Point> {
            let value = |i: i32| {
                if i < 10 {
                    12.0
                } else if i > 150 {
                    end
                } else {
                    3.0 - f64::from(i) * 0.001
                }
            };
            (0..300).map(|i| (i as usize, value(i))).collect()
        };
        let (good, bad) = (run(2.5), run(1e9));
        let (low, high) = usual_range([&*good, &*bad]).unwrap();
        assert!(low == 2.5 && high < 3.2, "{low} {high}");
        assert_eq!(usual_range([&[(1, 2.0)][..], &[(1, 3.0)]]), Some((2.0, 3.0)));
        assert_eq!(usual_range([&[(1, f64::NAN)][..]]), None);
    }
}
