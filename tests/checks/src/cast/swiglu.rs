//! Casts of SwiGLU from what goes into it: bit for bit those of what the kernel that writes SwiGLU has written.

use cubecl::prelude::*;
use float8_kernels::fused::{casts_swiglu, swiglu};
use float8_kernels::{Cast, Format, Granularity, KernelError, Orientation, ScaleMode, quantize_swiglu, reference};

use super::{Case, ORIENTATIONS, casts, check_amax, check_copies, poison_copies};
use crate::Failure;
use crate::case::{Cases, wrong};
use crate::data::{Content, DTYPES, F32, from_dtype, same};
use crate::device::{Layout, read, read_f32, upload_f32};
use crate::input::Input;
use crate::matrix::modes;

/// Ragged tiles by scalars, and rows longer than a cube keeps.
const SHAPES: [[usize; 2]; 2] = [[37, 141], [2, 16_448]];

const LARGE: [[usize; 2]; 1] = [[2048, 14_336]];

pub(super) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    for case in cases(all) {
        for observe in if case.cast.granularity == Granularity::Tensor { vec![false, true] } else { vec![false] } {
            let name = format!("{}{}", case.name("quantize_swiglu"), if observe { " observed" } else { "" });
            all.add(name, |client| check(client, &case, observe));
        }
    }
    all.add("quantize_swiglu refused", check_refused);
}

/// Every cast of ragged tiles that vectors load, in both orientations at once; of other orientations, shapes, layouts and contents one of
/// each granularity.
fn cases<R: Runtime>(all: &Cases<'_, R>) -> Vec<Case> {
    let first = |cast: &Cast| cast.format == Format::E4m3 && cast.scale_mode == modes(cast.granularity)[0];
    let mut cases = vec![];
    for dtype in DTYPES {
        let of = |shape| Input { content: Content::Normal, ..Input::new(shape, dtype) };
        for orientation in ORIENTATIONS {
            let is_asked = |cast: &Cast| orientation == Orientation::Both || first(cast);
            cases.extend(casts().filter(is_asked).map(|cast| Case { input: of([66, 136]), cast, orientation }));
            for cast in casts().filter(first) {
                let shapes = all.sizes(&SHAPES, &LARGE).into_iter().map(of);
                let offset = Input { layout: Layout::Offset, ..of([70, 264]) };
                cases.extend(shapes.chain([offset]).map(|input| Case { input, cast, orientation }));
            }
        }
    }
    for content in [Content::Spiced, Content::OneNan, Content::OneInf, Content::Zeros, Content::Huge] {
        let input = Input { content, ..Input::new([139, 264], F32) };
        cases.extend(casts().filter(first).map(|cast| Case { input, cast, orientation: Orientation::Both }));
    }
    cases
}

fn check<R: Runtime>(client: &ComputeClient<R>, case: &Case, observe: bool) -> Result<f64, Failure> {
    let &Case { input, cast, orientation } = case;
    let shape @ [rows, cols] = input.shape;
    let [(a, _), (b, _)] = [1, 2].map(|seed| input.upload(client, seed));
    let given = upload_f32(client, &[2.5]);
    let amax = (cast.granularity == Granularity::Tensor).then_some((&given, observe));
    if !casts_swiglu(client, input.dtype) {
        return match quantize_swiglu(client, [&a, &b], amax, cast, orientation) {
            Err(KernelError::UnsupportedDtype { .. }) => Ok(0.0),
            other => Err(wrong!("{} is not supported here, but the call gives {other:?}", input.dtype)),
        };
    }
    let y = from_dtype(&read(client, swiglu(client, &a, &b)?.y)?, input.dtype);
    poison_copies(client, shape, cast, orientation)?;
    let done = quantize_swiglu(client, [&a, &b], amax, cast, orientation)?;
    let found = read_f32(client, done.amax.clone())?;
    if amax.is_none() {
        check_copies(client, &done, shape, cast, orientation, |transposed| {
            let want = reference::quantize(&y, rows, cols, cast, transposed);
            (want.codes, want.scales)
        })?;
        check_amax(&found, &y, shape, cast.granularity, orientation)?;
        return Ok(0.0);
    }
    let scale = reference::amax_to_scale(2.5, cast.format, cast.scale_mode);
    let mut codes = vec![0; y.len()];
    reference::cast(&y, scale, cast.format, &mut codes);
    check_copies(client, &done, shape, cast, orientation, |_| (codes.clone(), vec![scale]))?;
    let want = if observe { reference::amax(&y) } else { 2.5 };
    if same(found[0], want) { Ok(0.0) } else { Err(wrong!("amax {:e}, not {want:e}", found[0])) }
}

fn check_refused<R: Runtime>(client: &ComputeClient<R>) -> Result<f64, Failure> {
    let view = |layout| Input { layout, content: Content::Normal, ..Input::new([4, 6], F32) }.upload(client, 1).0;
    let (dense, offset, pitched) = (view(Layout::RowMajor), view(Layout::Offset), view(Layout::Pitched));
    let amax = upload_f32(client, &[1.0]);
    let cast = |granularity| Cast { format: Format::E4m3, granularity, scale_mode: ScaleMode::F32 };
    let (blocks, tensor) = (cast(Granularity::Block1x128), cast(Granularity::Tensor));
    let quantize = |pair, amax, cast| quantize_swiglu(client, pair, amax, cast, Orientation::Both).map(|_| ());
    for (what, amax, cast) in [("no amax", None, tensor), ("an amax", Some((&amax, false)), blocks)] {
        match quantize([&dense, &dense], amax, cast) {
            Err(KernelError::NotTensorwise { granularity }) if granularity == cast.granularity => {}
            other => return Err(wrong!("{what}: {other:?}")),
        }
    }
    match quantize([&dense, &offset], None, blocks) {
        Err(KernelError::Misaligned { .. }) => {}
        other => return Err(wrong!("a and b that begin differently: {other:?}")),
    }
    match quantize([&dense, &pitched], None, blocks) {
        Err(KernelError::NotContiguous { .. }) => Ok(0.0),
        other => Err(wrong!("rows with a pitch: {other:?}")),
    }
}
