//! GEMMs whose tensor cores keep no more bits than real ones do: what is checked on a GPU passes.

use checks::{Bound, Size, visit};
use codegen::device::{Execution, GenerateCuda, OfflineDevice, execute, on_each};
use cubecl_core::Runtime;
use float8_kernels::{Format, GemmConfig, Granularity, gemm_path, reference, scaled_gemm};
use ptx_interpreter::Accumulator::{self, Full, Truncated};
use ptx_interpreter::Rounding::{Floor, ToZero};

use super::{Client, F32, MX, Matrix, Random, client, from_bytes};

/// Hopper's and Ada's first, then what else is said of them.
const SHORT: [Accumulator; 4] = [
    Truncated { fraction_bits: 13, rounding: ToZero },
    Truncated { fraction_bits: 13, rounding: Floor },
    Truncated { fraction_bits: 14, rounding: ToZero },
    Truncated { fraction_bits: 14, rounding: Floor },
];

/// Blackwell's.
const LONG: Accumulator = Truncated { fraction_bits: 25, rounding: ToZero };

/// One element of a long contraction, and a ragged matrix that has NaN and infinities too.
const TENSORWISE: [&str; 2] = [
    "scaled_gemm 1x1x1000 e4m3,e4m3 tensorwise,tensorwise ",
    "scaled_gemm 70x133x200 e5m2,e4m3 tensorwise,tensorwise ",
];

/// Scales that change along the contraction.
const BLOCKS: &str = "scaled_gemm 130x137x300 e4m3,e4m3 1x128,128x128 ";
const MX_BLOCKS: &str = "scaled_gemm 130x137x300 e4m3,e4m3 1x32,1x32 ";

/// Runs the checks whose names begin so, but not those of other kernels: random operands stay within [`Bound`], and those whose
/// sums are exact in few bits come out so.
fn run_checks(client: &Client, which: &[&str], what: &str) {
    let mut found = vec![0; which.len()];
    visit(client, Size::Small, &mut |case| {
        let name = case.name.clone();
        let place = which.iter().position(|which| name.starts_with(which));
        if let Some(place) = place.filter(|_| !name.contains("emulated")) {
            found[place] += 1;
            case.run().unwrap_or_else(|error| panic!("{name} with {what}: {error}"));
        }
    });
    // Random and exact operands, with promotion and with fast accumulation.
    assert!(found.iter().all(|found| *found >= 4), "{found:?} of {which:?}");
}

#[test]
fn checks_pass_with_short_accumulators() {
    let Some(running) = execute(Execution::default()) else { return };
    for accumulator in SHORT {
        running.set_accumulator(accumulator);
        on_each([(90, BLOCKS), (89, MX_BLOCKS)], |(sm, blocks)| {
            let which = [&TENSORWISE[..], &[blocks]].concat();
            run_checks(&client(sm), &which, &format!("{accumulator:?} on sm_{sm}"));
        });
    }
}

/// Blackwell's tensor memory has no promotion, so its accumulators must be longer.
#[test]
fn checks_pass_with_long_accumulators() {
    let Some(running) = execute(Execution::default()) else { return };
    running.set_accumulator(LONG);
    on_each([100, 120], |sm| {
        let which = [&TENSORWISE[..], &[MX_BLOCKS, BLOCKS]].concat();
        run_checks(&client(sm), &which, &format!("{LONG:?} on sm_{sm}"));
    });
}

/// 8 - 0.75, with four bits below the 8: on FP8 tensor cores, and in full on others.
#[test]
fn all_fp8_products_are_cut() {
    let Some(running) = execute(Execution::default()) else { return };
    let truncated = |rounding| Truncated { fraction_bits: 4, rounding };
    for (accumulator, cut) in [(truncated(ToZero), 7.5), (truncated(Floor), 7.0), (Full, 7.25)] {
        running.set_accumulator(accumulator);
        on_each([80, 89, 90, 100, 120], |sm| {
            let client = &client(sm);
            for granularity in [Granularity::Tensor, MX] {
                let config = GemmConfig { use_fast_accum: false, emulate: false };
                let path = gemm_path(client, [granularity; 2], config);
                let ones = |rows| {
                    let mut matrix = Matrix::random([rows, 2], Format::E4m3, granularity, &mut Random(1));
                    matrix.codes.fill(reference::encode(1.0, Format::E4m3));
                    matrix.inv_scales.fill(1.0);
                    matrix
                };
                let mut a = ones(1);
                a.codes = [8.0, -0.75].map(|x| reference::encode(x, Format::E4m3)).to_vec();
                let out = scaled_gemm(client, &a.upload(client), &ones(3).upload(client), None, F32, config).unwrap();
                let got = from_bytes(&client.read_one(out).unwrap_or_else(|error| panic!("{error:?}")), F32);
                let want = if path.is_native() { cut } else { 7.25 };
                assert_eq!(got, [want; 3], "{path} on sm_{sm} with {accumulator:?}");
            }
        });
    }
}

/// The largest error of an element, as a share of `Σ |a·b|`.
fn worst_share(client: &Client, [a, b]: [&Matrix; 2], config: GemmConfig) -> f64 {
    let out = scaled_gemm(client, &a.upload(client), &b.upload(client), None, F32, config).unwrap();
    let got = from_bytes(&client.read_one(out).unwrap_or_else(|error| panic!("{error:?}")), F32);
    let (k, left, right) = (a.shape[1], a.values(), b.values());
    let pairs = left.chunks_exact(k).flat_map(|row| right.chunks_exact(k).map(move |col| (row, col)));
    let share = |((row, col), got): ((&[f64], &[f64]), &f32)| {
        let products = row.iter().zip(col).map(|(a, b)| a * b);
        let (want, size) = products.fold((0.0, 0.0), |(want, size), product| (want + product, size + product.abs()));
        (f64::from(*got) - want).abs() / size
    };
    pairs.zip(&got).map(share).fold(0.0, f64::max)
}

/// A sum that runs on: its error grows slowly as long as bits are dropped toward zero. [`Bound`] does not allow for what comes of
/// dropping them downward, which has one direction, and notices it; promotion bounds both.
#[test]
fn long_contractions() {
    let Some(running) = execute(Execution::default()) else { return };
    let client = &GenerateCuda::client(&OfflineDevice { sm: 90, sms: 1 });
    let (m, n, k) = (64, 60, 4096);
    let mut random = Random(12);
    let [a, b] = [m, n].map(|rows| Matrix::random([rows, k], Format::E4m3, Granularity::Tensor, &mut random));
    for use_fast_accum in [false, true] {
        let config = GemmConfig { use_fast_accum, emulate: false };
        let granularities = [Granularity::Tensor; 2];
        let bound = Bound::of(gemm_path(client, granularities, config), config, granularities, k).get();
        let [zero, floor] = [SHORT[0], SHORT[1]].map(|accumulator| {
            running.set_accumulator(accumulator);
            worst_share(client, [&a, &b], config)
        });
        assert!(0.0 < zero && zero < floor && zero < bound / 8.0, "{zero:e}, {floor:e} downward, {bound:e}");
        assert_eq!(floor < bound, !use_fast_accum, "{floor:e}, not {bound:e}");
    }
}
