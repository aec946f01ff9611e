//! Attention on interpreted tensor cores, forward and backward, against its definition in f64.

use codegen::device::{Execution, GenerateCuda, OfflineDevice, execute, execute_shared, on_each};
use cubecl_core::Runtime;
use cubecl_runtime::client::ComputeClient;
use float8_kernels::attention::{
    AttentionInputs, AttentionKernel, AttentionOutput, AttentionSchedule, HeadsView, attention_backward,
    attention_forward, fix_attention_schedule,
};
use float8_kernels::check::{AttentionCase, in_dtype, split_mix};
use kernel_tests::{BF16, F16, Size, run};

/// Every mode, ragged and several tiles of rows and columns, and heads that share keys.
#[test]
fn modes() {
    let Some(_running) = execute_shared() else { return };
    let cases: [(u16, &[&str]); 5] = [
        (
            80,
            &[
                "attention grouped f16 mma",
                "attention mask bf16 mma",
                "attention few bf16 mma",
                "attention documents f16 mma",
                "attention mask_of_keys bf16 mma",
            ],
        ),
        (
            90,
            &[
                "attention mask_of_keys bf16 mma",
                "attention documents f16 mma",
                "attention strided bf16 mma",
                "attention few_masked f16 mma",
                "attention few f32 tiles",
            ],
        ),
        (
            90,
            &[
                "attention grouped bf16 wgmma",
                "attention more_keys f16 wgmma",
                "attention more_queries bf16 wgmma",
                "attention strided f16 wgmma",
                "attention wide bf16 wgmma",
                "attention documents bf16 wgmma",
                "attention mask f16 wgmma",
            ],
        ),
        (
            100,
            &[
                "attention more_queries f16 mma",
                "attention more_keys bf16 mma",
                "attention mask f16 mma",
                "attention mask_of_keys f16 mma",
                "attention documents bf16 mma",
                "attention strided f16 mma",
            ],
        ),
        (
            120,
            &[
                "attention one_query bf16 mma",
                "attention wide f16 mma",
                "attention several f16 mma",
                "attention mask bf16 mma",
                "attention mask_of_keys bf16 mma",
                "attention documents f16 mma",
                "attention strided bf16 mma",
            ],
        ),
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

/// Heads of 64, 96 and 128 on warpgroups, in several rounds of every ring: with several items per
/// block, and with softcap.
#[test]
fn rings_of_wgmma() {
    let Some(running) = execute(Execution::default()) else { return };
    let softcap = Some(1.5);
    let cases = [
        (2, AttentionCase::causal([2, 4, 2], [300, 300], [128; 2], BF16)),
        (3, AttentionCase { causal: false, softcap, ..AttentionCase::causal([1, 4, 1], [129, 390], [96, 64], F16) }),
        (1, AttentionCase { documents: true, ..AttentionCase::causal([1, 2, 1], [600, 600], [64; 2], BF16) }),
    ];
    on_each(cases, |(sms, case)| {
        let client = &GenerateCuda::client(&OfflineDevice { sm: 90, sms });
        case.run(client, true, 1).unwrap_or_else(|flaw| panic!("{case:?}: {flaw}"));
    });
    // Forward alone has wider heads.
    let client = &GenerateCuda::client(&OfflineDevice { sm: 90, sms: 2 });
    let wide = AttentionCase::causal([1, 2, 1], [150, 150], [256; 2], BF16);
    wide.run(client, false, 1).unwrap_or_else(|flaw| panic!("{wide:?}: {flaw}"));
    // Forward, dq, and dk with dv.
    assert_eq!(running.launches_of("wgmma.mma_async"), 3 * 3 + 1);
}

/// Gradients, y and lse of one causal problem of heads of 128 in bf16.
fn results(client: &ComputeClient<GenerateCuda>, kernel: AttentionKernel, positions: usize) -> Vec<Vec<u8>> {
    let view = |number, [a, b, c, d]: [usize; 4]| {
        let value = |i| (split_mix(number, i as u64) >> 40) as f32 / (1 << 22) as f32 - 2.0;
        let (bytes, _) = in_dtype(&(0..a * b * c * d).map(value).collect::<Vec<_>>(), BF16).expect("a float");
        let strides = [b * c * d, c * d, d, 1];
        HeadsView { handle: client.create_from_slice(&bytes), shape: [a, b, c, d], strides, dtype: BF16 }
    };
    let [query, dy] = [0, 1].map(|number| view(number, [1, 4, positions, 128]));
    let [key, value] = [2, 3].map(|number| view(number, [1, 2, positions, 128]));
    let (mask, bias, documents, softcap, causal, scale) = (None, None, None, None, true, 0.1);
    let inputs = AttentionInputs { query, key, value, mask, bias, documents, scale, softcap, causal, kernel };
    let AttentionOutput { y, lse } = attention_forward(client, &inputs).expect("inputs that fit");
    let of_y = HeadsView { handle: y.clone(), strides: [4 * positions * 128, 128, 4 * 128, 1], ..dy.clone() };
    let gradients = attention_backward(client, &inputs, &of_y, &lse, &dy).expect("inputs that fit");
    let handles = [y, lse].into_iter().chain(gradients).collect();
    client.read(handles).iter().map(|bytes| bytes.to_vec()).collect()
}

/// The same bits in every order of warps and copies, on any number of SMs, and with each schedule.
#[test]
fn bits() {
    for (kernel, sm, positions) in
        [(AttentionKernel::Wgmma, 90, 260), (AttentionKernel::Mma, 80, 140), (AttentionKernel::Tiles, 90, 70)]
    {
        let mut all = vec![];
        for (seed, sms) in [(0, 132), (3, 2), (5, 3)] {
            let Some(running) = execute(Execution { seed }) else { return };
            let client = &GenerateCuda::client(&OfflineDevice { sm, sms });
            all.push(results(client, kernel, positions));
            if kernel == AttentionKernel::Wgmma {
                for schedule in [AttentionSchedule::Overlapped, AttentionSchedule::PingPong] {
                    fix_attention_schedule(schedule);
                    all.push(results(client, kernel, positions));
                }
                fix_attention_schedule(AttentionSchedule::default());
                assert_eq!(running.launches_of("wgmma.mma_async"), 9);
            }
        }
        assert!(all.iter().all(|bits| *bits == all[0]), "{kernel:?}");
    }
}
