//! Casts of SwiGLU and of RMSNorm from what goes into them: bit for bit those of what the kernels that write them have written.

use core::fmt;

use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;
use float8_kernels::fused::{FusedInputs, FusedKernel, casts_fused, inverse_rms, rms_norm, swiglu};
use float8_kernels::{Cast, Format, Granularity, KernelError, MatrixView, Orientation, ScaleMode};
use float8_kernels::{quantize_fused, reference};

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

const EPSILON: f32 = 1e-5;

/// What the cast makes.
#[derive(Clone, Copy)]
enum Op {
    SwiGlu,
    RmsNorm { gamma: StorageType, layout: Layout },
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SwiGlu => write!(f, "swiglu"),
            Self::RmsNorm { gamma, layout } => write!(f, "rms_norm by {gamma} {layout}"),
        }
    }
}

/// An operation's tensors on the device, the first with what else the cast reads.
struct Tensors {
    first: MatrixView,
    second: MatrixView,
    inverse_rms: Option<Handle>,
}

impl Op {
    fn upload<R: Runtime>(self, client: &ComputeClient<R>, input: Input) -> Tensors {
        let (second, seed) = match self {
            Self::SwiGlu => (input, 2),
            Self::RmsNorm { gamma, layout } => {
                let content = Content::Normal;
                (Input { shape: [1, input.shape[1]], dtype: gamma, layout, content }, 3)
            }
        };
        Tensors { first: input.upload(client, 1).0, second: second.upload(client, seed).0, inverse_rms: None }
    }

    /// Whether it is to be cast without being written.
    fn is_cast<R: Runtime>(self, client: &ComputeClient<R>, tensors: &Tensors) -> bool {
        let kernel = match self {
            Self::SwiGlu => FusedKernel::SwiGlu,
            Self::RmsNorm { .. } => FusedKernel::RmsNorm,
        };
        casts_fused(client, kernel, [tensors.first.dtype, tensors.second.dtype])
    }

    /// What the kernel of its own writes; what its cast reads besides is left in `tensors`.
    fn write<R: Runtime>(self, client: &ComputeClient<R>, tensors: &mut Tensors) -> Result<Handle, KernelError> {
        let Tensors { first, second, inverse_rms: inverses } = tensors;
        Ok(match self {
            Self::SwiGlu => swiglu(client, first, second)?.y,
            Self::RmsNorm { .. } => {
                *inverses = Some(inverse_rms(client, first, second, EPSILON)?);
                rms_norm(client, first, second, EPSILON)?.y
            }
        })
    }
}

impl Tensors {
    fn inputs(&self) -> FusedInputs<'_> {
        let Self { first, second, inverse_rms } = self;
        match inverse_rms {
            None => FusedInputs::SwiGlu { a: first, b: second },
            Some(inverse_rms) => FusedInputs::RmsNorm { x: first, gamma: second, inverse_rms },
        }
    }
}

pub(super) fn add<R: Runtime>(all: &mut Cases<'_, R>) {
    for (op, case) in swiglus(all).into_iter().chain(rms_norms()) {
        for observe in if case.cast.granularity == Granularity::Tensor { vec![false, true] } else { vec![false] } {
            let name = case.name(&format!("quantize_{op}"));
            let name = format!("{name}{}", if observe { " observed" } else { "" });
            all.add(name, move |client| check(client, op, &case, observe));
        }
    }
    all.add("quantize_swiglu refused", check_refused);
    all.add("quantize_rms_norm refused", check_refused_gamma);
}

/// One of each granularity.
fn is_first(cast: &Cast) -> bool {
    cast.format == Format::E4m3 && cast.scale_mode == modes(cast.granularity)[0]
}

fn normal(shape: [usize; 2], dtype: StorageType) -> Input {
    Input { content: Content::Normal, ..Input::new(shape, dtype) }
}

/// Every cast of ragged tiles that vectors load, in both orientations at once; of other orientations, shapes, layouts and contents one of
/// each granularity.
fn swiglus<R: Runtime>(all: &Cases<'_, R>) -> Vec<(Op, Case)> {
    let mut cases = vec![];
    for dtype in DTYPES {
        let of = |shape| normal(shape, dtype);
        for orientation in ORIENTATIONS {
            let is_asked = |cast: &Cast| orientation == Orientation::Both || is_first(cast);
            cases.extend(casts().filter(is_asked).map(|cast| Case { input: of([66, 136]), cast, orientation }));
            for cast in casts().filter(is_first) {
                let shapes = all.sizes(&SHAPES, &LARGE).into_iter().map(of);
                let offset = Input { layout: Layout::Offset, ..of([70, 264]) };
                cases.extend(shapes.chain([offset]).map(|input| Case { input, cast, orientation }));
            }
        }
    }
    for content in [Content::Spiced, Content::OneNan, Content::OneInf, Content::Zeros, Content::Huge] {
        let input = Input { content, ..Input::new([139, 264], F32) };
        cases.extend(casts().filter(is_first).map(|cast| Case { input, cast, orientation: Orientation::Both }));
    }
    cases.into_iter().map(|case| (Op::SwiGlu, case)).collect()
}

/// What SwiGLU's do not show: rows and columns past the last, by vectors and by scalars, and γ that lies as x does or does not. One of each
/// granularity in both orientations at once, and by rows alone where that is another kernel.
fn rms_norms() -> Vec<(Op, Case)> {
    let by_rows = Cast { format: Format::E4m3, granularity: Granularity::Row, scale_mode: ScaleMode::F32 };
    let with = |input, (gamma, layout)| {
        let both = casts().filter(is_first).map(|cast| (cast, Orientation::Both));
        let asked = both.chain([(by_rows, Orientation::Rows)]);
        let case = move |(cast, orientation)| (Op::RmsNorm { gamma, layout }, Case { input, cast, orientation });
        asked.map(case).collect::<Vec<_>>()
    };
    let mut cases = vec![];
    for dtype in DTYPES {
        for gamma in if dtype == F32 { vec![F32] } else { vec![F32, dtype] } {
            for shape in [[37, 141], [70, 264], [2, 16_448]] {
                cases.extend(with(normal(shape, dtype), (gamma, Layout::RowMajor)));
            }
            cases.extend(with(Input { layout: Layout::Offset, ..normal([70, 264], dtype) }, (gamma, Layout::RowMajor)));
            cases.extend(with(normal([70, 264], dtype), (gamma, Layout::Offset)));
        }
    }
    // A whole row of NaN, and scales of it.
    let one_nan = Input { content: Content::OneNan, ..Input::new([139, 264], F32) };
    cases.extend(with(one_nan, (F32, Layout::RowMajor)));
    cases
}

fn check<R: Runtime>(client: &ComputeClient<R>, op: Op, case: &Case, observe: bool) -> Result<f64, Failure> {
    let &Case { input, cast, orientation } = case;
    let shape @ [rows, cols] = input.shape;
    let mut tensors = op.upload(client, input);
    let given = upload_f32(client, &[2.5]);
    let amax = (cast.granularity == Granularity::Tensor).then_some((&given, observe));
    if !op.is_cast(client, &tensors) {
        if matches!(op, Op::RmsNorm { .. }) {
            tensors.inverse_rms = Some(client.empty(rows * 4));
        }
        return match quantize_fused(client, tensors.inputs(), amax, cast, orientation) {
            Err(KernelError::UnsupportedDtype { .. }) => Ok(0.0),
            other => Err(wrong!("{} is not supported here, but the call gives {other:?}", input.dtype)),
        };
    }
    let y = op.write(client, &mut tensors)?;
    let y = from_dtype(&read(client, y)?, input.dtype);
    poison_copies(client, shape, cast, orientation)?;
    let done = quantize_fused(client, tensors.inputs(), amax, cast, orientation)?;
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

/// E4M3 with scales in f32.
fn e4m3(granularity: Granularity) -> Cast {
    Cast { format: Format::E4m3, granularity, scale_mode: ScaleMode::F32 }
}

fn check_refused<R: Runtime>(client: &ComputeClient<R>) -> Result<f64, Failure> {
    let view = |layout| Input { layout, ..normal([4, 6], F32) }.upload(client, 1).0;
    let (dense, offset, pitched) = (view(Layout::RowMajor), view(Layout::Offset), view(Layout::Pitched));
    let amax = upload_f32(client, &[1.0]);
    let (blocks, tensor) = (e4m3(Granularity::Block1x128), e4m3(Granularity::Tensor));
    let quantize = |[a, b]: [&MatrixView; 2], amax, cast| {
        quantize_fused(client, FusedInputs::SwiGlu { a, b }, amax, cast, Orientation::Both).map(|_| ())
    };
    for (what, amax, cast) in [("no amax", None, tensor), ("an amax", Some((&amax, false)), blocks)] {
        match quantize([&dense, &dense], amax, cast) {
            Err(KernelError::UnfitGranularity { granularity, .. }) if granularity == cast.granularity => {}
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

fn check_refused_gamma<R: Runtime>(client: &ComputeClient<R>) -> Result<f64, Failure> {
    let upload = |shape, dtype| normal(shape, dtype).upload(client, 1).0;
    let x = upload([4, 6], F32);
    let quantize = |gamma: &MatrixView, inverses: usize| {
        let inverse_rms = &client.empty(inverses * 4);
        let inputs = FusedInputs::RmsNorm { x: &x, gamma, inverse_rms };
        quantize_fused(client, inputs, None, e4m3(Granularity::Block1x128), Orientation::Both).map(|_| ())
    };
    match quantize(&upload([1, 5], F32), 4) {
        Err(KernelError::ShapeMismatch { x: [4, 6], operand: [1, 5] }) => {}
        other => return Err(wrong!("γ of another length: {other:?}")),
    }
    match quantize(&upload([1, 6], crate::F16), 4) {
        Err(KernelError::UnsupportedDtype { dtype }) if dtype == crate::F16 => {}
        other => return Err(wrong!("γ of fewer bits than x: {other:?}")),
    }
    // Memory is given out in multiples of more bytes than four rows have.
    match quantize(&upload([1, 6], F32), 4) {
        Ok(()) => Ok(0.0),
        other => Err(wrong!("γ that fits: {other:?}")),
    }
}
