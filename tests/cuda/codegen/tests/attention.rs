//! Attention on interpreted tensor cores, forward and backward, against its definition in f64.

use codegen::device::{GenerateCuda, OfflineDevice, execute_shared, on_each};
use cubecl_core::Runtime;
use float8_kernels::check::AttentionCase;
use kernel_tests::{BF16, F16, Size, run};

/// Every mode, ragged and several tiles of rows and columns, and heads that share keys.
#[test]
fn modes() {
    let Some(_running) = execute_shared() else { return };
    let cases: [(u16, &[&str]); 4] = [
        (80, &["attention grouped f16 mma", "attention mask bf16 mma", "attention few bf16 mma"]),
        (
            90,
            &[
                "attention mask_of_keys bf16 mma",
                "attention documents f16 mma",
                "attention strided bf16 mma",
                "attention few_masked f16 mma",
                "attention parts f32 tiles",
            ],
        ),
        (100, &["attention more_queries f16 mma", "attention more_keys bf16 mma"]),
        (120, &["attention one_query bf16 mma", "attention wide f16 mma", "attention several f16 mma"]),
    ];
    on_each(cases, |(sm, names)| {
        let client = &GenerateCuda::client(&OfflineDevice::new(sm));
        let count = run(client, Size::Small, |name| names.contains(&name));
        assert_eq!(count.unwrap_or_else(|failure| panic!("sm_{sm}: {failure}")), names.len(), "sm_{sm}");
    });
}

/// The widest heads, whose dk and dv are separate launches.
#[test]
fn widest() {
    let Some(_running) = execute_shared() else { return };
    on_each([(80, BF16), (120, F16)], |(sm, dtype)| {
        let client = &GenerateCuda::client(&OfflineDevice::new(sm));
        let case = AttentionCase::causal([1, 2, 1], [70, 70], [256, 192], dtype);
        case.run(client, true, 1).unwrap_or_else(|flaw| panic!("sm_{sm}: {flaw}"));
    });
}
