//! GEMMs with the short accumulators of real tensor cores pass the checks for a GPU.

use codegen::device::{Execution, GenerateCuda, OfflineDevice, execute, on_each};
use cubecl_core::Runtime;
use float8_kernels::{Format, GEMV_ROWS, Granularity, gemm_path, reference, scaled_gemm};
use kernel_tests::{Gemm, HostMatrix, Size, run};
use ptx_interpreter::Accumulator::{self, Full, Truncated};
use ptx_interpreter::Rounding::{Floor, ToZero};

use super::{Client, F32, FAST, MX, PRECISE, client};

/// A column of a long contraction, a ragged matrix with NaN and infinities, and scales of rows.
/// Groups of rows and of the contraction, and groups that start inside a square of 128 by 128.
const CHECKS: [&str; 6] = [
    "scaled_gemm 5x1x1000 e4m3,e4m3 tensorwise,tensorwise ",
    "scaled_gemm 70x133x200 e5m2,e4m3 tensorwise,tensorwise ",
    "scaled_gemm 130x137x300 e4m3,e4m3 rowwise,rowwise ",
    "grouped_gemm rows 64+128+64:200 456x200x160 e4m3,e4m3 tensorwise,tensorwise ",
    "grouped_gemm contraction 64+128+64:200 200x160x520 e4m3,e4m3 tensorwise,tensorwise ",
    "grouped_gemm rows 0+70+1+0+133+0:10 214x200x384 e4m3,e4m3 1x128,128x128 ",
];

/// Scales that change along the contraction.
const BLOCKS: &str = "scaled_gemm 130x137x300 e4m3,e4m3 1x128,128x128 ";
const MX_BLOCKS: &str = "scaled_gemm 130x137x300 e4m3,e4m3 1x32,1x32 ";

/// Runs the checks with these name prefixes, except for emulated kernels. Random operands stay
/// within [`error_bound`](float8_kernels::GemmPath::error_bound), and sums that are exact in few
/// bits are exact.
fn run_checks(client: &Client, which: &[&str], what: &str) {
    for which in which {
        let count = run(client, Size::Small, |name| name.starts_with(which) && !name.contains("emulated"));
        let count = count.unwrap_or_else(|failure| panic!("{what}: {failure}"));
        // Random and exact operands, with promotion and with fast accumulation.
        assert!(count >= 4, "{count} of {which}");
    }
}

#[test]
fn checks_pass_with_short_accumulators() {
    let Some(running) = execute(Execution::default()) else { return };
    for accumulator in Accumulator::HOPPER {
        running.set_accumulator(accumulator);
        on_each([(90, BLOCKS), (89, MX_BLOCKS)], |(sm, blocks)| {
            let which = [&CHECKS[..], &[blocks]].concat();
            run_checks(&client(sm), &which, &format!("{accumulator:?} on sm_{sm}"));
        });
    }
}

/// Blackwell's tensor memory has no promotion, so its accumulators must be longer.
#[test]
fn checks_pass_with_long_accumulators() {
    let Some(running) = execute(Execution::default()) else { return };
    running.set_accumulator(Accumulator::BLACKWELL);
    on_each([100, 120], |sm| {
        let which = [&CHECKS[..], &[MX_BLOCKS, BLOCKS]].concat();
        run_checks(&client(sm), &which, &format!("{:?} on sm_{sm}", Accumulator::BLACKWELL));
    });
}

/// 8 - 0.75, with four bits below the 8: truncated on FP8 tensor cores, and in full on others.
#[test]
fn all_fp8_products_are_cut() {
    let Some(running) = execute(Execution::default()) else { return };
    let truncated = |rounding| Truncated { fraction_bits: 4, rounding };
    for (accumulator, cut) in [(truncated(ToZero), 7.5), (truncated(Floor), 7.0), (Full, 7.25)] {
        running.set_accumulator(accumulator);
        on_each([80, 89, 90, 100, 120], |sm| {
            let client = &client(sm);
            for granularity in [Granularity::Tensor, MX] {
                let path = gemm_path(client, [granularity; 2], PRECISE);
                // All scales are 1.
                let rows_of = |rows: usize, row: [f32; 2]| {
                    let codes = row.map(|x| reference::encode(x, Format::E4m3)).repeat(rows);
                    HostMatrix { codes, ..HostMatrix::identity([rows, 2], Format::E4m3, granularity) }.upload(client)
                };
                // More rows than a GEMV, which does not use tensor cores.
                let m = GEMV_ROWS + 1;
                let (a, b) = (rows_of(m, [8.0, -0.75]), rows_of(3, [1.0, 1.0]));
                let out = scaled_gemm(client, &a, &b, None, F32, PRECISE).unwrap();
                let got = client.read_one(out).unwrap_or_else(|error| panic!("{error:?}"));
                let want: f32 = if path.is_native() { cut } else { 7.25 };
                assert_eq!(got[..], want.to_le_bytes().repeat(3 * m), "{path} on sm_{sm} with {accumulator:?}");
            }
        });
    }
}

/// The error of a long sum grows slowly while bits are dropped toward zero. Dropping them downward
/// adds a bias, which exceeds [`error_bound`](float8_kernels::GemmPath::error_bound); promotion
/// bounds both.
#[test]
fn long_contractions() {
    let Some(running) = execute(Execution::default()) else { return };
    let client = &GenerateCuda::client(&OfflineDevice { sm: 90, sms: 1 });
    for config in [PRECISE, FAST] {
        let gemm = Gemm { config, ..Gemm::new([64, 60, 4096]) };
        let ([a, b], granularities) = (gemm.matrices(), gemm.granularities);
        let bound = gemm_path(client, granularities, config).error_bound(config, granularities, gemm.shape[2]);
        // With a bound of 1, the error is the share of `Σ |a·b|`.
        let [zero, floor] = [Accumulator::HOPPER[0], Accumulator::HOPPER[1]].map(|accumulator| {
            running.set_accumulator(accumulator);
            gemm.compare(client, [&a, &b], Some(1.0)).unwrap()
        });
        assert!(0.0 < zero && zero < floor && zero < bound / 8.0, "{zero:e}, {floor:e} downward, {bound:e}");
        assert_eq!(floor < bound, config == PRECISE, "{floor:e}, not {bound:e}");
    }
}
